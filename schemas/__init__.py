"""The leaf package: what is written to disk or crosses a process, and how it is checked."""
