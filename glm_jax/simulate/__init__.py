"""What an engine would do with a request trace, in virtual time: no device, no waiting."""
