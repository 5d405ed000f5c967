"""The folder that is put on the path of an observed program; what is in it knows nothing of lanewise."""
