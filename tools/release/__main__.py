"""``python -m release wheel`` builds this machine's wheel; ``check [TAG]`` checks the files in
dist.
"""

from __future__ import annotations

import sys

from release.build import build
from release.files import problems


def main() -> int:
    """Run a command; return 1 if the files in dist may not be published."""
    command, *rest = sys.argv[1:]
    if command == "wheel":
        build()
    found = problems(rest[0] if rest else None)
    for problem in found:
        print(problem)
    if not found:
        print("the files in dist are complete")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
