"""What is known about a step, made to be read: computes nothing, and knows nothing of torch."""
