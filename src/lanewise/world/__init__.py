"""Who this process is among all, and how it communicates with the others. Import from the submodules."""
