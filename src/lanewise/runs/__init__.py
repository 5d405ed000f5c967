"""What a run leaves on disk: how it is written, read again and shown."""
