"""Package metadata of fs-lowrank. The build system and the tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# Read from the file, not imported: at this point nothing is installed yet.
versions = Path("fs_lowrank/versions.py").read_text(encoding="utf-8")
version = re.search(r'^__version__ = "(.+)"$', versions, re.MULTILINE)[1]

setup(
    name="fs-lowrank",
    version=version,
    description="Federated low-rank fine-tuning: RoLoRA, FFA-LoRA, FlexLoRA, FLoRA and more, from one YAML",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    project_urls={
        "FederatedScope": "https://github.com/alibaba/FederatedScope/tree/llm",
        "RoLoRA (paper)": "https://arxiv.org/abs/2502.01755",
        "FedFisher (paper)": "https://arxiv.org/abs/2403.12329",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords=["federated learning", "LoRA", "low-rank adaptation", "fine-tuning"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # Three folders of the repository are installed inside the package, so that they shadow no other package.
    packages=[
        *find_packages(include=["fs_lowrank*"]),
        *(f"fs_lowrank.{name}" for name in find_packages(include=["benchmark*", "hpo*"])),
        "fs_lowrank.examples",
    ],
    package_dir={f"fs_lowrank.{name}": name for name in ("benchmark", "hpo", "examples")},
    package_data={
        "fs_lowrank": ["py.typed", "**/*.yaml", "**/templates/*"],
        "fs_lowrank.benchmark": ["suites/*.yaml", "templates/*"],
        "fs_lowrank.hpo": ["spaces/*.yaml"],
        "fs_lowrank.examples": ["*.yaml", "*.ipynb"],
    },
    install_requires=[
        "torch>=2.8",
        "transformers>=5.0",
        "peft>=0.21",
        "datasets>=4.0",
        "accelerate>=1.0",
        "safetensors>=0.5",
        "numpy>=2.0",
        "packaging>=24",
        "pandas>=2.2",
        "filelock>=3.16",
        "pypi-simple>=1.6",
        "requests>=2.32",
        "tqdm>=4.66",
        "pillow>=10",
        "pyarrow>=16",
        "psutil>=5.9.5",
        "pyyaml>=6.0.1",
        "rich>=13",
        "argcomplete>=3.5",
        "markdown-it-py>=3",
        "matplotlib>=3.10",
        "jinja2>=3.1",
        "scikit-learn>=1.5",
        "scipy>=1.13",
    ],
    extras_require={
        # The framework itself is on no package index; README says how to put a checkout of it on the path.
        "federatedscope": [
            "grpcio>=1.60",
            "protobuf>=4.25",
            "pydantic>=2.10",
            "pympler>=1.0",
            "scipy>=1.13,<2",
            "scikit-learn>=1.5",
        ],
        # In an environment of its own (constraints-flower.txt), since it holds back packages that others have newer.
        "flower": ["flwr[simulation]>=1.41,<1.43"],
        "eval": ["lm-eval>=0.4.13"],
        "hpo": ["optuna>=5.0", "cmaes>=0.11", "scipy>=1.13"],
        # K-FAC needs curvlinops and backpack on top, with --no-deps: theirs would bring torchvision and another torch.
        "oneshot": [
            "scipy>=1.13",
            "POT>=0.9.4",
            "einops>=0.8",
            "einconv>=0.1",
            "linear_operator>=0.5",
            "opt-einsum>=3.4",
            "unfoldNd>=0.2",
            "tqdm>=4.66",
        ],
        "trackers": ["tensorboard>=2.18"],
        "gguf": ["gguf>=0.10"],
        "quant": ["bitsandbytes>=0.50"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings>=1.0", "mkdocstrings-python>=2.0"],
        "dev": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "nbclient>=0.10",
            "ipykernel>=6.29",
            "ruff",
            "mypy",
            "types-PyYAML",
            "types-requests",
            "scikit-learn",
            "selenium>=4.30",
            "tensorboard>=2.18",
            "lm-eval>=0.4.13",
            "optuna>=5.0",
            "cmaes>=0.11",
            "scipy",
            "POT",
            "einops",
            "einconv",
            "linear_operator",
            "opt-einsum",
            "unfoldNd",
            "tqdm",
        ],
    },
    entry_points={
        "console_scripts": ["fs-lowrank = fs_lowrank.__main__:main"],
        "fs_lowrank.commands": ["benchmark = fs_lowrank.benchmark.cli:main", "hpo = fs_lowrank.hpo.cli:main"],
    },
)
