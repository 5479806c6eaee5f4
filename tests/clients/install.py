"""Install the clients that need more than pip: npm packages, and aiperf in a venv of its own.

    python tests/clients/install.py .venv-aiperf

The npm packages go into tests/clients/node/node_modules; without Node.js they are left out, and their
tests are skipped. aiperf needs a venv of its own, because it pins much of what the gateway uses too.
Running it twice does nothing the second time.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

AIPERF = "aiperf==0.13.0"
NODE = Path(__file__).resolve().parent / "node"
NODE_INSTALLED = NODE / "node_modules" / "installed"
OLDEST_NODE = 18


def no_node() -> str | None:
    """Why there can be no npm packages, in one sentence; None if there can."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return "Node.js with npm is not installed; on Debian: apt-get install nodejs npm."
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)\.", version)
    if found is None or int(found[1]) < OLDEST_NODE:
        return f"Node.js is {version.strip()}, {OLDEST_NODE} or newer is needed."
    return None


def install_node() -> None:
    if reason := no_node():
        print(f"  no npm packages: {reason}")
        return
    recipe = hashlib.sha256((NODE / "package.json").read_bytes()).hexdigest()
    if NODE_INSTALLED.exists() and NODE_INSTALLED.read_text() == recipe:
        print("  the npm packages are installed")
        return
    shutil.rmtree(NODE_INSTALLED.parent, ignore_errors=True)
    print("  installing npm packages", flush=True)
    options = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    subprocess.run(["npm", "install", *options], cwd=NODE, check=True)
    NODE_INSTALLED.write_text(recipe)


def install_aiperf(folder: Path) -> None:
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == AIPERF:
        print(f"  aiperf is installed in {folder}")
        return
    print("  installing aiperf", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
    subprocess.run([*pip, "install", AIPERF], check=True)
    stamp.write_text(AIPERF)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where aiperf's venv goes, such as .venv-aiperf")
    folder: Path = parser.parse_args().folder
    try:
        install_node()
        install_aiperf(folder.resolve())
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed; its message is above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
