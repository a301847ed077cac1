"""Steps launched by CUDA graphs, in one arena."""
