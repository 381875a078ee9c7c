"""`python -m mmaccel` is the command line."""

from mmaccel.cli import main

raise SystemExit(main())
