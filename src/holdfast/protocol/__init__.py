"""Messages, shared memory and client code that trainer and keeper processes share. No torch."""
