"""Tables and figures of the papers as files: what was published, what is run, and which claims have to hold."""
