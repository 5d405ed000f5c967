"""What runs on a world from its start to its end: training, evaluating, predicting."""
