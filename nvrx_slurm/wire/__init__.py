"""What crosses a process boundary: the messages of Coordinator and agent, and a rank's page and socket."""
