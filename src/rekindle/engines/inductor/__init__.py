"""Steps whose small ops are compiled by Inductor."""
