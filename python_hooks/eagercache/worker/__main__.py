"""`python -m eagercache.worker`: a compile worker."""

import sys

from eagercache.worker.main import main

sys.exit(main(sys.argv[1:]))
