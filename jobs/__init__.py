"""What a person or `ray job submit` starts: the `rayrl` command and one module per job."""
