"""The sections of a configuration: every key with its default, its bounds and what it is for.

Defaults are FederatedScope's (branch ``llm``), except where a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .check import key

#: networks of ours, by ``model.type`` (``models.vision``)
VISION_MODELS = ("lenet", "fedma_cnn", "resnet10", "resnet18")


@dataclass(frozen=True)
class Federate:
    client_num: int = key(0)
    #: clients a round; -1 is all of them. ``sample_client_rate`` goes first if both are given
    sample_client_num: int = key(-1, min=-1)
    sample_client_rate: float = key(-1.0, max=1.0)
    total_round_num: int = key(50, min=1)
    mode: str = key("standalone", choices=("standalone", "distributed"), local="standalone")
    #: never ``FedAvg`` with adapters: see the module's docstring
    method: str = key("fedavg")
    #: True weighs clients equally; False by their number of samples
    ignore_weight: bool = key(False)
    #: the framework's default is False
    make_global_eval: bool = key(True)
    sampler: str = key("uniform", local="uniform")
    use_ss: bool = key(False, local=False)
    merge_test_data: bool = key(False, local=False)
    restore_from: str = key("", local="")
    share_local_model: bool = key(False, result=False)
    online_aggr: bool = key(False, result=False)
    process_num: int = key(1, result=False)
    save_to: str = key("", result=False, idle="a run leaves its adapter or model in outdir")
    save_freq: int = key(-1, result=False)


@dataclass(frozen=True)
class Data:
    root: str = key("data")
    #: a data set by name, or ``FILE@…``; the framework's default is a toy of its own
    type: str = key("")
    args: list = key([])
    #: the framework's default is empty: data that comes in parts
    splitter: str = key("iid")
    splitter_args: list = key([])
    #: shares of train, validation, test
    splits: list[float] = key([0.8, 0.1, 0.1], min=0.0)
    subsample: float = key(1.0, above=0.0, max=1.0)
    #: of images: steps such as ``[['RandomHorizontalFlip'], ['ToTensor'], ['Normalize', {'mean': …, 'std': …}]]``,
    #: under torchvision's names; empty: normalised as is usual for the set
    transform: list = key([])
    #: of held-out images; empty: ``transform`` without its random steps
    val_transform: list = key([])
    test_transform: list = key([])


@dataclass(frozen=True)
class Dataloader:
    batch_size: int = key(64, min=1)
    shuffle: bool = key(True)
    num_workers: int = key(0, min=0, result=False, idle="data are in memory")
    drop_last: bool = key(False)


@dataclass(frozen=True)
class Model:
    #: ``NAME_OR_PATH@huggingface_llm``, ``NAME_OR_PATH@transformers``, or a model of ours by name
    type: str = key("")
    #: inferred from the suffix of ``type`` if empty; ``node`` is the framework's default and says nothing
    task: str = key("", choices=("", "CausalLM", "SequenceClassification", "ImageClassification"), also={"node": ""})
    #: of our networks for images
    use_bias: bool = key(True)


@dataclass(frozen=True)
class Adapter:
    #: None: as the method has it
    use: bool | None = key(None)
    #: one mapping in a list, as in the framework; resolved to PEFT's names. Read ``config.adapter`` instead
    args: list[dict] = key([{}])
    mv_to_cpu: bool = key(False, result=False)


@dataclass(frozen=True)
class Chat:
    max_history_len: int = key(10, result=False)
    max_len: int = key(100, result=False)


@dataclass(frozen=True)
class Cache:
    #: folder for downloaded models
    model: str = key("", result=False, idle="downloaded models lie where HF_HOME says")


@dataclass(frozen=True)
class LLM:
    #: tokens
    tok_len: int = key(128, min=1)
    retry_on_nan_loss: bool = key(False, local=False)
    adapter: Adapter = field(default_factory=Adapter)
    chat: Chat = field(default_factory=Chat)
    cache: Cache = field(default_factory=Cache)


OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Adafactor",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)


@dataclass(frozen=True)
class Optimizer:
    type: str = key("SGD", choices=OPTIMIZERS, fold=True)
    lr: float = key(0.1, above=0.0)
    #: further arguments: ``momentum``, ``weight_decay``, ``betas``, …
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class Scheduler:
    type: str = key("")
    warmup_ratio: float = key(0.0, min=0.0, max=1.0)
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class Train:
    local_update_steps: int = key(1, min=1)
    batch_or_epoch: str = key("batch", choices=("batch", "epoch"))
    #: 16-bit weights: float16 in the framework, bfloat16 in the local engine
    is_enable_half: bool = key(False)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    #: ours: keep what the frozen layers below the first adapter put out. YAML reads a bare ``off`` as False
    cache_frozen: str = key("auto", choices=("auto", "off"), also={False: "off", True: "auto"}, result=False)
    #: bytes
    cache_frozen_bytes: float = key(4e9, min=0.0, result=False)
    #: in memory if empty, else a folder for memory-mapped files
    cache_frozen_dir: str = key("", result=False)
    #: dropout in those layers; False lets their output be kept
    frozen_dropout: bool = key(False)


@dataclass(frozen=True)
class Grad:
    #: largest norm; negative is off
    grad_clip: float = key(-1.0)
    grad_accum_count: int = key(1, min=1)


@dataclass(frozen=True)
class EarlyStop:
    #: evaluations without improvement; 0 is off, and the default here (5 in the framework)
    patience: int = key(0, min=0)
    delta: float = key(0.0, min=0.0)
    improve_indicator_mode: str = key("best", choices=("best", "mean"), local="best")


@dataclass(frozen=True)
class Eval:
    #: rounds between evaluations; 0 or -1: after the last round only
    freq: int = key(1, min=-1)
    #: the framework's default is an empty list
    metrics: list[str] = key(["acc"], items=("acc", "loss"))
    split: list[str] = key(["test", "val"], items=("train", "val", "test"))
    #: which round is the best: ``SPLIT_METRIC``
    best_res_update_round_wise_key: str = key("val_loss")
    #: ours; 0: as ``dataloader.batch_size``
    batch_size: int = key(0, min=0)
    report: list[str] = key(["weighted_avg", "avg", "fairness", "raw"], result=False)
    count_flops: bool = key(True, result=False)
    extra: dict = key({}, open=True, result=False)


def server_lr(kind: str) -> float:
    """The default ``fedopt.optimizer.lr``: 1 for SGD, which then is FedAvg; 0.01 for the adaptive ones."""
    return 1.0 if kind.lower() == "sgd" else 0.01


@dataclass(frozen=True)
class ServerOptimizer:
    type: str = key("SGD", choices=("SGD", "Adam", "Adagrad", "Yogi"), fold=True)
    #: None: ``server_lr`` of the type; the framework's default is 0.01 for all
    lr: float | None = key(None, above=0.0)
    #: further arguments: ``momentum``, ``betas``, …
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class FedOpt:
    use: bool = key(False)
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    annealing: bool = key(False, local=False)
    annealing_step_size: int = key(2000, min=1)
    annealing_gamma: float = key(0.5, above=0.0)


@dataclass(frozen=True)
class Lowrank:
    """What the framework has no key for. Every other key belongs to the method."""

    #: a round stops when fewer clients than this have sent a usable update
    min_clients: int = key(1, min=1)
    #: the largest training set that a client may claim; an update of one that claims more is refused
    max_samples: int = key(10**9, min=1)
    #: an update whose norm, of its change against what the client was sent, is larger is refused; 0: off
    max_update_norm: float = key(0.0, min=0.0)
    #: the same, as a factor over the median of the round's updates; 0: off
    max_update_norm_factor: float = key(0.0, min=0.0)
    #: when the server's step fails on admitted updates, or gives what is not finite: end the run, or leave the round
    #: out
    on_bad_round: str = key("stop", choices=("stop", "skip"))
    #: chance that a client drops out of a round it was chosen for, drawn from the seed: to try what a method stands
    drop_rate: float = key(0.0, min=0.0, max=1.0)
    #: seconds that a process waits for another one: between machines, and with ``federate.process_num``
    timeout: float = key(600.0, above=0.0, result=False)
    #: of the frozen weights and the arithmetic; trained tensors are the method's business
    dtype: str = key("float32", choices=("float32", "bfloat16"))
    #: norm of a ResNet; ``static`` is batch-norm that evaluates by the batch's own statistics
    norm: str = key("batch", choices=("batch", "static", "group", "none"))
    #: multiplies the hidden widths of a network for images
    width: float = key(1.0, above=0.0, max=8.0)
    #: a ``.safetensors`` file that a network for images starts from; without one it is trained from scratch
    weights: str = key("")
    #: where layers with an adapter start in a network from scratch: at random, the adapter changing nothing; or at
    #: zero, both halves of the pair random
    base_init: str = key("random", choices=("random", "zero"))
    #: held-out samples by which a method chooses, drawn from the validation split; fewer where it has fewer
    validation_samples: int = key(500, min=1)
    #: seed that cuts off the test set of data that come without one; -1: the run's. It is to be the same in a search
    #: and in the runs that follow, or what the search saw lies in their test sets
    test_seed: int = key(-1, min=-1)
    #: folder to keep clients' trained tensors in: what was trained once, from the same start on the same data, is
    #: taken from there; empty: off
    reuse_clients: str = key("", result=False)
    #: also write the model with the adapter merged in
    save_merged: bool = key(False, result=False)
    #: rounds between checkpoints; 0: none
    checkpoint_freq: int = key(1, min=0, result=False)
    keep_checkpoints: int = key(2, min=1, result=False)
    #: hyperparameters of the method, complete
    params: dict = key({}, open=True)
