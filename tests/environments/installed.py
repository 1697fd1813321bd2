"""Installs the wheel without extras in an environment of its own, and uses it as a new user would.

    python tests/environments/installed.py dist FOLDER

FOLDER becomes the environment. It must not contain the packages of the extras `demo` and `report`; a bundle and a
vector of an image folder are made there with the model `tiny`; commands that need an extra name it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from environment import ROOT, Environment

ABSENT = ("scikit-learn", "scikit-image", "mlxtend", "fonttools", "matplotlib")
"""Packages of the extras. jinja2 is one as well, but torch requires it."""
IMAGES = """
from pathlib import Path
from PIL import Image, ImageDraw
for split, count in (("train", 24), ("test", 8)):
    for number in range(count):
        for name in ("circle", "square"):
            image = Image.new("RGB", (32, 32), (number * 5, 40, 90))
            draw = ImageDraw.Draw(image)
            box = (4 + number % 5, 4 + number % 7, 20 + number % 9, 20 + number % 9)
            (draw.ellipse if name == "circle" else draw.rectangle)(box, fill=(250, 250 - number, 200))
            folder = Path("shapes", split, name)
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
"""


def main(dist: str, folder: str) -> int:
    environment = Environment(Path(folder), clear=True)
    (wheel,) = Path(dist).glob("kfacpack-*.whl")
    (sdist,) = Path(dist).glob("kfacpack-*.tar.gz")
    environment.install("--constraint", str(ROOT / "constraints.txt"), str(wheel))
    versions = environment.versions()
    present = [name for name in ABSENT if name in versions]
    check(not present, f"{wheel.name} installs {present}, which belong to extras")
    print(f"installed {wheel.name} (and built {sdist.name}): {len(versions)} packages, none of {', '.join(ABSENT)}")
    with TemporaryDirectory() as name:
        use(environment, Path(name))
    print("installcheck: passed")
    return 0


def use(environment: Environment, folder: Path) -> None:
    """Runs the commands in a folder that does not contain the source."""
    variables = {"KFACPACK_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub")}

    def kfacpack(*arguments: str, code: int = 0) -> str:
        done = environment.run("kfacpack", *arguments, capture=True, cwd=folder, **variables)
        check(done.returncode == code, f"kfacpack {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
        output = (done.stdout or done.stderr).strip().splitlines()
        print("\n".join([f"$ kfacpack {' '.join(arguments)}", *(output if len(output) < 12 else [*output[:3], "…"])]))
        return done.stdout if code == 0 else done.stderr

    environment.run("python", "-c", IMAGES, cwd=folder).check_returncode()
    data = ("--task", "shapes", "--data", "shapes")
    kfacpack("--version")
    kfacpack("tasks", "--json")
    kfacpack("estimate", "--model", "tiny", *data, "-o", "shapes.kfac", "--quiet")
    kfacpack("verify", "shapes.kfac")
    kfacpack("train", "--model", "tiny", *data, "-o", "shapes.safetensors", "--steps", "5", "--quiet")
    scores = json.loads(kfacpack("eval", "--model", "tiny", "--vector", "shapes.safetensors", *data, "--json"))
    check(scores["tasks"]["shapes"]["examples"] == 16, f"eval: expected 16 examples, got {scores}")
    for arguments, extra in (
        (("demo",), "demo"),
        (("report", ".", "-o", "report.html"), "report"),
        (("measure", "spectra", "shapes.kfac", "--figure", "spectra.png"), "report"),
        (("estimate", "--task", "digits", "-o", "digits.kfac"), "demo"),
    ):
        message = kfacpack(*arguments, code=2)
        check(f"pip install 'kfacpack[{extra}]'" in message, f"{arguments[0]}: does not name the extra: {message}")


def check(condition: bool, problem: str) -> None:
    if not condition:
        sys.exit(f"installcheck: {problem}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
