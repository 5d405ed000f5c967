"""`python -m lanewise.launch`: the server that workers are forked from; `fork_client` starts it."""

from lanewise.launch.fork_server import main

main()
