"""Which process of the run this is, and how it communicates with the others. Import from the submodules."""
