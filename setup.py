"""Package metadata of fs-lowrank."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="fs-lowrank",
    version="0.1.0",
    description="Federated low-rank fine-tuning: RoLoRA, FFA-LoRA, FlexLoRA, FLoRA and more, from one YAML",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["fs_lowrank*", "benchmark*", "hpo*"]),
    package_data={"benchmark": ["suites/*.yaml"], "hpo": ["spaces/*.yaml"]},
    install_requires=[
        "torch>=2.8",
        "transformers>=5.0",
        "peft>=0.18",
        "datasets>=4.0",
        "accelerate>=1.0",
        "safetensors>=0.5",
        "numpy>=2.0",
        "pandas>=2.2",
        "filelock>=3.16",
        "pypi-simple>=1.6",
        "requests>=2.32",
        "tqdm>=4.66",
        "pillow>=10",
        "pyyaml>=6.0",
        "rich>=13",
        "markdown-it-py>=3",
        "matplotlib>=3.8",
    ],
    extras_require={
        # The framework itself is on no package index; README says how to put a checkout of it on the path.
        "federatedscope": ["grpcio", "protobuf", "pympler", "scipy", "scikit-learn"],
        "eval": ["lm-eval>=0.4.13"],
        "hpo": ["optuna>=5.0", "plotly>=6", "cmaes>=0.11", "scipy"],
        # K-FAC needs curvlinops and backpack on top, with --no-deps: theirs would bring torchvision and another torch.
        "oneshot": ["scipy", "POT", "einops", "einconv", "linear_operator", "opt-einsum", "unfoldNd", "tqdm"],
        "gguf": ["gguf"],
        "dev": [
            "pytest>=8",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "scikit-learn",
            "lm-eval>=0.4.13",
            "optuna>=5.0",
            "plotly>=6",
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
    entry_points={"console_scripts": ["fs-lowrank = fs_lowrank.cli:main"]},
)
