"""The ``kvtransfer`` command: one file per subcommand."""
