"""Where samples are read and batches formed, in threads or a process: the driver of the machine, and the messages."""
