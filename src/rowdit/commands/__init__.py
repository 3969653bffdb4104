"""The verbs of the command line, a module each: `run(arguments) -> exit code`. `rowdit.cli` dispatches to them."""
