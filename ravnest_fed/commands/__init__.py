"""The `ravnest-fed` command: what operators and curious people call. One file a subcommand or a family of them.

Brokers and clients have commands of their own in their packages; `demo` starts those as processes.
"""
