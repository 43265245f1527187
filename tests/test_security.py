"""I6: nothing in a checkpoint is ever unpickled or executed."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np

from asyncckpt import blocking
from tests.children import output

PACKAGE = Path(__file__).parents[1] / "asyncckpt"

UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
EXECUTORS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("np", "load"), ("numpy", "load"), ("torch", "load")}

PROGRAM = """
import sys
from asyncckpt import blocking

root = sys.argv[1]

def everything():
    blocking.restore(root)
    blocking.inspect(root)
    return blocking.verify(root)

everything()  # what is imported and compiled lazily is not what is looked for
seen = []
watched = {"pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile", "import",
           "subprocess.Popen", "os.system", "ctypes.dlopen"}
sys.addaudithook(lambda event, _: seen.append(event) if event in watched else None)
assert everything().ok
assert not seen, seen
print("nothing")
"""


def test_the_package_has_no_means_to_unpickle_or_execute() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {(node.module or "").partition(".")[0]}
            assert not names & UNPICKLERS, (file, node.lineno)
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name):
                assert function.id not in EXECUTORS, (file, node.lineno)
            elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                assert (function.value.id, function.attr) not in LOADERS, (file, node.lineno)


def test_reading_a_checkpoint_unpickles_and_executes_nothing(tmp_path: Path) -> None:
    tree = {"a": np.arange(3), "b": {"n": 1, "text": "import os", "raw": b"\x80\x04N." * 500}}
    blocking.save(tmp_path / "x", tree, metadata={"note": "__import__('os')"})
    assert output(PROGRAM, tmp_path / "x").strip() == "nothing"
