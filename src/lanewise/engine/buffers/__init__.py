"""What lanes make of a model's buffers, such as BatchNorm's statistics, and how that is merged."""
