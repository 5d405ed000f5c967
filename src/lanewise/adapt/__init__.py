"""What programs for other libraries hold, read from outside: an optimizer, overridden methods, a loss."""
