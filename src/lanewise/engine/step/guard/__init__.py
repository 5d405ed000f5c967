"""What is looked at in the steps of a run, so that code which breaks what lanes rely on is named."""
