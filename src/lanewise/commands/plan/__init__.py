"""Says before a training what memory and traffic it needs on any number of devices."""
