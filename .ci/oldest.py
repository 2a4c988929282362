"""Prints the oldest version of every package that setup.py allows on this Python, as pip constraints (PITFALLS R66)."""

import re
import runpy
import sys
import types

from pip._vendor.packaging.requirements import Requirement

given = {}
sys.modules["setuptools"] = types.SimpleNamespace(setup=given.update, find_packages=lambda **_: [])
runpy.run_path("setup.py")
for line in given["install_requires"]:
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate():
        print(f"{requirement.name}=={re.search(r'>=([^,]+)', str(requirement.specifier))[1]}")
