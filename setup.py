"""Puts the CPU interpreter, compiled for every instruction set of the platform, into a binary wheel.

A build without a compiler gives a wheel of pure Python, and an editable install compiles nothing: the interpreter is
then compiled at its first use. ALLYOUNEED_WHEEL=pure asks for the former. For another machine set CXX to its compiler
and `--plat-name` (docs/machines.md).
"""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
FOLDER = Path("allyouneed/kernels/cpu")


def machine_of(platform: str) -> str:
    """linux_aarch64, macosx_11_0_arm64, win_amd64 … to the machine's name in instruction_sets.py."""
    names = {"aarch64": "aarch64", "arm64": "aarch64", "x86_64": "x86_64", "amd64": "x86_64"}
    return next((machine for end, machine in names.items() if platform.replace("-", "_").endswith(end)), "")


class BuildLibraries(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or os.environ.get("ALLYOUNEED_WHEEL") == "pure" or not self.distribution.has_libraries:
            return
        sets = runpy.run_path(str(HERE / "src" / FOLDER / "instruction_sets.py"))
        target = Path(self.build_lib) / FOLDER / "libraries"
        target.mkdir(parents=True, exist_ok=True)
        machine = machine_of(self.distribution.platform_name)
        names = [name for name, one in sets["SETS"].items() if one.machine == machine] or ["portable"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(
                lambda name: sets["compile_library"](name, target / f"interpreter-{name}.so", "-s"), names
            ):
                pass


class PlatformWheel(bdist_wheel):
    """A wheel of libraries that ctypes loads: for any Python 3, on one platform."""

    def finalize_options(self) -> None:
        try:
            runpy.run_path(str(HERE / "src" / FOLDER / "instruction_sets.py"))["compiler"]()
            self.distribution.has_libraries = os.environ.get("ALLYOUNEED_WHEEL") != "pure"
        except OSError as error:
            print(f"allyouneed: a wheel without the CPU interpreter: {error}")
        super().finalize_options()
        self.distribution.platform_name = self.plat_name

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", "any" if self.root_is_pure else platform


class WithLibraries(Distribution):
    has_libraries = False  # set by PlatformWheel
    platform_name = ""

    def has_ext_modules(self) -> bool:
        return self.has_libraries


setup(distclass=WithLibraries, cmdclass={"build_py": BuildLibraries, "bdist_wheel": PlatformWheel})
