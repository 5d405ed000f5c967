"""`python -m lanewise.launch`: the server that workers are forked from; `fork_server` starts it."""

from lanewise.launch.serve import main

main()
