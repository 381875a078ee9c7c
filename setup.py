"""Packages: kernels/, pipelines/, samplers/ and tokenizers_vq/ are installed inside mmaccel.

They have no __init__.py on purpose: when Python starts in this directory, a folder without one
never hides an installed package of the same name (transformers imports a package called `kernels`).
"""

from setuptools import find_namespace_packages, setup

TOP_FOLDERS = ("kernels", "pipelines", "samplers", "tokenizers_vq")
NOT_CODE = ("*.__pycache__", "*.weights", "*.weights.*", "*.example_workflows*")


def packages_in(folder: str) -> list[str]:
    return find_namespace_packages(include=[folder, f"{folder}.*"], exclude=NOT_CODE)


setup(
    packages=[
        *packages_in("mmaccel"),
        *(f"mmaccel.{package}" for folder in TOP_FOLDERS for package in packages_in(folder)),
    ],
    package_dir={f"mmaccel.{folder}": folder for folder in TOP_FOLDERS},
)
