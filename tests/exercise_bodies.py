"""Bodies that students may write: mistakes (exercise_wrong.txt), and right ones in unusual forms (exercise_right.txt).

    python tests/exercise_bodies.py          # says which wrong bodies pass, and which right ones fail
    python tests/exercise_bodies.py gae      # of one exercise

A block begins with the name of an exercise, and says in words what the body does. Where an exercise has several parts,
the name of the function follows that of the exercise. Lines with + take the place of those with -, which are text of
the script. Without lines with -, they take the place of all that the exercise leaves out there.
"""

import ast
import contextlib
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import exercise
from exercise_rules import RULES

FOLDER = Path(__file__).parent
SCRIPT = exercise.SCRIPT.read_text()


class Body(NamedTuple):
    exercise: str
    words: str
    text: str  # of the script with it


def read_bodies(file: str) -> list[Body]:
    bodies = []
    for block in (FOLDER / file).read_text().split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        if head.startswith("#"):
            continue
        where, _, words = head.partition(": ")
        name, *function = where.split()
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        if old:
            assert SCRIPT.count(old) == 1, (words, old)
            text = SCRIPT.replace(old, new)
        else:
            [gap] = [gap for gap in exercise.BLANKS[name].gaps if function in ([], [gap.function])]
            text = with_lines(gap, new)
        bodies.append(Body(name, words, text))
    return bodies


def with_lines(gap: exercise.Gap, body: str) -> str:
    """The script with this body in place of what the gap leaves out."""
    lines, left_out = SCRIPT.splitlines(), exercise.lines_of(gap)
    first = lines[left_out.start]
    indent = first[: len(first) - len(first.lstrip())]
    lines[left_out.start : left_out.stop] = textwrap.indent(textwrap.dedent(body), indent).splitlines()
    return "\n".join(lines) + "\n"


NODES = ast.parse(SCRIPT).body


@contextlib.contextmanager
def put_into(module, text: str):
    """Within, the functions and classes of the module that `text` changes are those of `text`.

    Loading a whole script takes half a second, and this takes a few milliseconds.
    """
    theirs, ours = text.splitlines(), SCRIPT.splitlines()
    same = next(i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b)
    [node] = [node for node in NODES if node.lineno <= same + 1 <= node.end_lineno]
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
    end = node.end_lineno + len(theirs) - len(ours)
    source = "\n" * (first - 1) + "\n".join(theirs[first - 1 : end])
    before = dict(vars(module))
    exec(compile(source, "exercise.py", "exec"), vars(module))
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


def broken_rules(module, body: Body) -> list[str]:
    with put_into(module, body.text):
        results = exercise.try_rules(body.exercise, module, "exercise.py")
        return [result.words for result in results if result.kind != exercise.HOLDS]


def main(names):
    healthy = exercise.load("ppo_llm.py", SCRIPT)
    for file in "exercise_wrong.txt", "exercise_right.txt":
        for name in names or RULES:
            bodies = [body for body in read_bodies(file) if body.exercise == name]
            found = [(body, broken_rules(healthy, body)) for body in bodies]
            passed = [body.words for body, broken in found if not broken]
            print(f"{file} {name}: {len(passed)} of {len(bodies)} pass")
            if "wrong" in file:
                print("".join(f"    {words}\n" for words in passed), end="")
            else:
                print("".join(f"    {body.words}: {broken}\n" for body, broken in found if broken), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
