"""The parts of a run, built from its configuration, resumed and saved."""
