"""The sections of a configuration: every key with its default, bounds and meaning.

Defaults are FederatedScope's (branch ``llm``), except where a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .check import key
from .metrics import METRICS, TASKS

#: our image networks, by ``model.type`` (``models.vision``)
VISION_MODELS = ("lenet", "fedma_cnn", "resnet10", "resnet18")
#: of them, those whose norm ``lowrank.norm`` chooses
WITH_NORM = ("resnet10", "resnet18")
#: values of ``lowrank.dtype`` for quantised weights (``models.quantised``)
QUANTISED = ("int8", "nf4")


@dataclass(frozen=True)
class Federate:
    #: number of clients; 0 is FederatedScope's "not given" and is refused
    client_num: int = key(0)
    #: number of clients in a round; -1 is all. ``sample_client_rate`` takes precedence if both are given
    sample_client_num: int = key(-1, min=-1)
    #: fraction of the clients that take part in a round, above 0; -1: not given
    sample_client_rate: float = key(-1.0, max=1.0)
    #: number of rounds
    total_round_num: int = key(50, min=1)
    #: whether all clients are simulated by one command, or each runs as a process of its own
    mode: str = key("standalone", choices=("standalone", "distributed"))
    #: with adapters, ``fedavg`` becomes ``fedlora``: see the docstring of ``config``
    method: str = key("fedavg")
    #: True weights clients equally, False by the number of training samples that they have. FederatedScope weights them
    #: by the samples that they process in a round, which with `batch_or_epoch` ``batch`` and full batches are equally
    #: many: there True gives its result
    ignore_weight: bool = key(False)
    #: FederatedScope's default is False
    make_global_eval: bool = key(True)
    #: secret sharing: the server sees the sum of the updates, not each of them
    use_ss: bool = key(False)
    #: the server sees the sum of the updates: clients send what it needs for that, and a method that needs each update
    #: is refused. FederatedScope adds up updates as they arrive; the other engines store those of a round until its end
    online_aggr: bool = key(False)
    #: processes that train the clients of a round, beside the run's own; 0, written ``auto``, is one for each GPU or
    #: core
    process_num: int = key(1, min=0, also={"auto": 0}, words="a whole number or auto", result=False)


@dataclass(frozen=True)
class Data:
    #: folder below which named data sets and relative file names are looked for
    root: str = key("data")
    #: the name of a data set, or ``FILE@…``; FederatedScope's default is its toy data set
    type: str = key("")
    #: a list of one mapping with what the data set needs, such as the names of columns (`data.args.0.…`)
    args: list = key([])
    #: how the training rows are divided among the clients: `iid`, `dirichlet` (`lda`), `mixture`, `shards`, `field`
    #: (`meta`), `file` or `quantity`. FederatedScope's default is empty: data that are already split into clients
    splitter: str = key("iid")
    #: a list of one mapping with the arguments of the splitter (`data.splitter_args.0.…`)
    splitter_args: list = key([])
    #: fractions for train, validation, test
    splits: list[float] = key([0.8, 0.1, 0.1], min=0.0)
    #: fraction of the training rows that is used
    subsample: float = key(1.0, above=0.0, max=1.0)
    #: fraction of the test rows that is scored, alike by class
    test_subsample: float = key(1.0, above=0.0, max=1.0)
    #: largest fraction of the rows of a split that may be left out because the prompt fills ``llm.tok_len``, and of all
    #: rows because the text, the instruction or the answer is empty
    max_dropped: float = key(0.01, min=0.0, max=1.0, result=False)
    #: for images: steps such as ``[['RandomHorizontalFlip'], ['ToTensor'], ['Normalize', {'mean': …, 'std': …}]]``,
    #: with torchvision's names; empty: the usual normalisation for the data set
    transform: list = key([])
    #: for held-out images; empty: ``transform`` without its random steps
    val_transform: list = key([])
    #: for test images; empty: as `val_transform` is read
    test_transform: list = key([])


_COLUMN, _FILE = "the name of a column", "the name of a file"


@dataclass(frozen=True)
class DataArgs:
    """All keys of ``data.args``. Each data set supports some of them."""

    #: in tokens; None: ``llm.tok_len``
    max_len: int | None = key(None, min=1)
    #: form of an instruction: the tokenizer's chat template, Alpaca's, or the first of them that there is (of the sets
    #: that FederatedScope knows by name, such as `gsm8k@llm`, Alpaca's); or a text with columns in braces, the answer
    #: last: `"Question: {question} Answer: {output}"`
    template: str = key("auto", words="auto, chat, alpaca, or a text with {column} fields")
    #: tokens with a loss: those of the answer, or all
    loss_on: str = key("answer", choices=("answer", "all"))
    #: column of the text
    text: str = key("text", words=_COLUMN)
    #: column of the second sentence
    text_pair: str | None = key(None, words=_COLUMN)
    #: column of the class, of the number (`model.task: SequenceRegression`), or of a list of classes (`model.task:
    #: MultiLabelClassification`), for which there may be a column of 0 and 1 for each class instead: `[insult, threat]`
    label: str | list[str] = key("label", words=f"{_COLUMN}, or for sets of classes a list of columns of 0 and 1")
    #: column of the instruction; None: `instruction`, `prompt`, `query` or `question`. Conversations need none of these
    #: three: a column `messages` or `conversations`, a list of turns with `role` and `content`, of which the last is
    #: the assistant's, or ShareGPT's with `from` and `value`, is read by its name
    instruction: str | None = key(None, words=_COLUMN)
    #: column of the instruction's input; None: `input` or `context`, if there is one
    input: str | None = key(None, words=_COLUMN)
    #: column of the answer; None: `output`, `response`, `completion` or `answer`
    output: str | None = key(None, words=_COLUMN)
    #: column that a splitter may use
    category: str | None = key(None, words=_COLUMN)
    #: whether double quotes enclose the fields of a table; None: in `.csv`, not in `.tsv`
    quoting: bool | None = key(None)
    #: file with validation data, in the folder of `data.type`; None: a share of the training rows, by `data.splits`
    validation: str | None = key(None, words=_FILE)
    #: file with test data, in the folder of `data.type`; None: a share of the rows, by `data.splits`
    test: str | None = key(None, words=_FILE)
    #: name of a configuration on the Hugging Face hub
    config: str | None = key(None)
    #: size of images in pixels, for both sides or as ``[height, width]``
    size: int | tuple[int, int] | None = key(None, min=1, words="pixels, or [height, width]")
    #: channels of images: 1 converts to gray, 3 repeats a gray channel; None: as they are
    channels: int | None = key(None, choices=(1, 3))


@dataclass(frozen=True)
class Dataloader:
    #: samples of a client in one step
    batch_size: int = key(64, min=1)
    #: ours: the most tokens of a client in one step, padding included, in place of ``batch_size``; a sample with more
    #: is alone. 0: ``batch_size`` samples
    batch_tokens: int = key(0, min=0)
    #: draw a client's samples in random order
    shuffle: bool = key(True)
    #: leave out a last batch that is smaller than the others
    drop_last: bool = key(False)


@dataclass(frozen=True)
class Model:
    #: ``NAME_OR_PATH@huggingface_llm``, ``NAME_OR_PATH@transformers``, or the name of one of our image networks
    type: str = key("")
    #: inferred from the suffix of ``type`` if empty (``node``, FederatedScope's default, counts as empty);
    #: ``SequenceRegression``, ``MultiLabelClassification`` and ``Seq2SeqLM`` (T5) have to be said
    task: str = key("", choices=("", *TASKS), also={"node": ""})
    #: for our image networks
    use_bias: bool = key(True)
    #: ours, on the embedded engine and on Flower: spread the base of a process over several GPUs, memory and disk, by
    #: accelerate; empty: one device
    device_map: str = key("", choices=("", "auto", "balanced", "balanced_low_0", "sequential"), result=False)
    #: ours: with ``device_map``, the most of each device, `DEVICE=SIZE` such as `0=20GiB` and `cpu=60GiB`
    max_memory: list[str] = key([], result=False)
    #: ours: with ``device_map``, the folder for weights that lie on the disk and are not in the checkpoint as they
    #: are; empty: a temporary one
    offload_folder: str = key("", result=False)
    #: ours: the code of attention in models of transformers; empty: theirs
    attn_implementation: str = key(
        "", choices=("", "eager", "sdpa", "flash_attention_2", "flex_attention"), result=False
    )


@dataclass(frozen=True)
class Adapter:
    #: None: decided by the method
    use: bool | None = key(None)
    #: a list of one mapping, as in FederatedScope, with PEFT's names; ``config.adapter`` is the parsed form
    args: list[dict] = key([{}])


@dataclass(frozen=True)
class LLM:
    #: in tokens; ``auto``: 99 % of the training rows fit, up to the limit of the model
    tok_len: int | Literal["auto"] = key(128, min=1)
    adapter: Adapter = field(default_factory=Adapter)


OPTIMIZERS = tuple("SGD Adam AdamW Adagrad Adadelta Adamax Adafactor ASGD NAdam RAdam RMSprop Rprop".split())


#: of bitsandbytes, whose state has 8 bits for each number of a tensor with 4096 or more
OPTIMIZERS_8BIT = ("Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdam8bit", "PagedAdamW8bit", "PagedLion8bit", "SGD8bit")


@dataclass(frozen=True)
class Optimizer:
    #: the client optimizer, a class of `torch.optim`, or one of bitsandbytes with a state of 8 bits; its further
    #: arguments are written beside this key
    type: str = key("SGD", choices=(*OPTIMIZERS, *OPTIMIZERS_8BIT), fold=True)
    #: learning rate of the clients
    lr: float = key(0.1, above=0.0)
    #: further arguments: ``momentum``, ``weight_decay``, ``betas``, …
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class Scheduler:
    #: how the learning rate falls over the rounds: empty or `constant`, `linear`, `cosine`
    type: str = key("")
    #: fraction of the rounds with a linearly increasing rate, also without a ``type``; FederatedScope drops it
    warmup_ratio: float = key(0.0, min=0.0, max=1.0)
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class Train:
    #: length of a client's training in a round, in `batch_or_epoch`
    local_update_steps: int = key(1, min=1)
    #: whether the length counts steps of one batch or passes over the client's data
    batch_or_epoch: str = key("batch", choices=("batch", "epoch"))
    #: 16-bit weights: float16 in FederatedScope, bfloat16 in the local engine
    is_enable_half: bool = key(False)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    #: ours: cache the outputs of the frozen layers below the first adapter, and its keys and values: of clients that
    #: make half a pass over their samples or more, or of all. YAML reads a bare ``off`` as False
    cache_frozen: str = key("auto", choices=("auto", "all", "off"), also={False: "off", True: "auto"}, result=False)
    #: maximum size of the cache in bytes
    cache_frozen_bytes: float = key(4e9, min=0.0, result=False)
    #: folder of the files that are stored for other runs; empty: the one that `fs-lowrank cache` shows
    cache_frozen_dir: str = key("", result=False)
    #: maximum size on disk, in bytes, of the states that other runs may use (``fs-lowrank cache``); 0: none
    cache_frozen_shared: float = key(8e9, min=0.0, result=False)
    #: compute the last layer's queries and feed-forward only for the positions that the loss reads
    only_read: str = key("auto", choices=("auto", "off"), also={False: "off", True: "auto"}, result=False)
    #: blocks of samples of similar length that a cohort's batch is computed in, against padding; 0, written ``auto``,
    #: is as many as save more than they cost
    blocks: int = key(0, min=0, also={"auto": 0}, words="a whole number or auto", result=False)
    #: clients of a round that are trained in one forward and backward pass; 1, written ``off``: one by one; 0, written
    #: ``auto``, is as many as a GPU's memory has room for, and on a CPU ``off`` unless batches have few tokens
    cohort: int = key(
        0, min=0, also={"auto": 0, "off": 1, False: 1, True: 0}, words="off, a whole number or auto", result=False
    )
    #: ours: compute a layer's activations again in the backward pass instead of keeping them, which takes a third more
    #: time; results are the same
    checkpointing: bool = key(False, result=False)
    #: ours: compute in bfloat16 what allows it; weights, adapters and optimizers keep their dtype
    autocast: str = key("off", choices=("off", "bfloat16"), also={False: "off", True: "bfloat16"})
    #: dropout in the layers of the cache; False allows caching
    frozen_dropout: bool = key(False)


@dataclass(frozen=True)
class Grad:
    #: maximum norm; 0 or negative: off
    grad_clip: float = key(-1.0)
    #: batches whose gradients are added before a step of the optimizer. FederatedScope's trainer for language models
    #: steps after every batch, whatever this is
    grad_accum_count: int = key(1, min=1)


@dataclass(frozen=True)
class EarlyStop:
    #: number of evaluations without improvement; 0: off, our default (5 in FederatedScope)
    patience: int = key(0, min=0)
    #: how much better an evaluation must be to count as an improvement; with 0, one as good as the best one counts
    delta: float = key(0.0, min=0.0)
    #: what an evaluation is compared with: the best one before it, or with ``mean`` the mean of the ``patience`` before
    #: it, and then one that is not better ends the run
    improve_indicator_mode: str = key("best", choices=("best", "mean"))


@dataclass(frozen=True)
class Generate:
    #: ours: rounds between answers of the global model to held-out prompts, which ``answers.jsonl`` has; 0: none
    freq: int = key(0, min=0, result=False)
    #: whose prompts
    split: str = key("test", choices=("test", "val"), result=False)
    #: number of prompts
    prompts: int = key(8, min=1, result=False)
    #: tokens of an answer, at most
    max_tokens: int = key(64, min=1, result=False)
    #: 0: the most likely token; above 0: sampled
    temperature: float = key(0.0, min=0.0, result=False)
    #: how an answer is scored against that of the data: exact_match (but for case and blanks), rouge_l, or a function
    #: of (answer, reference) as ``MODULE:FUNCTION``
    score: str = key("exact_match", result=False)


@dataclass(frozen=True)
class Eval:
    #: rounds between evaluations; 0 or -1: after the last round only (FederatedScope: -1 is every round)
    freq: int = key(1, min=-1)
    #: further metrics: ``f1`` (of two classes that of the second, else the mean over the classes), ``matthews``, and of
    #: language models ``perplexity``. Loss and accuracy are always measured; of a regression the loss, ``pearson`` and
    #: ``spearman``. FederatedScope's default is an empty list
    metrics: list[str] = key(
        ["acc"], items=tuple(METRICS), dropped={"correct": "acc is that number as a share of the samples"}
    )
    #: what is evaluated. A split without data is refused, but for `val` with the default, and so is `train`, whose loss
    #: is in each round's record
    split: list[str] = key(["test", "val"], items=("train", "val", "test"))
    #: the metric that selects the best round, ``SPLIT_METRIC``
    best_res_update_round_wise_key: str = key("val_loss")
    #: ours: also save what was trained as it was after the best round, by validation data; ``auto``: if the run
    #: evaluates any. The metric is that of ``best_res_update_round_wise_key``
    save_best: bool | Literal["auto"] = key("auto", words="True, False or auto", result=False)
    #: ours: also evaluate the model that each client has on its share of the test set, as ``client_test``; at the end,
    #: the score on clients that never took part. It is always done where clients have models of their own, and with
    #: ``federate.make_global_eval`` False
    client_scores: bool = key(False, result=False)
    #: ours: also evaluate before round 1; ``before.json`` and ``summary.json`` have the metrics
    before: bool = key(False, result=False)
    #: ours; 0: as ``dataloader.batch_size``
    batch_size: int = key(0, min=0)
    generate: Generate = field(default_factory=Generate)


def server_lr(kind: str) -> float:
    """The default ``fedopt.optimizer.lr``: 1 for SGD, which is then FedAvg; 0.01 for adaptive optimizers."""
    return 1.0 if kind.lower() == "sgd" else 0.01


@dataclass(frozen=True)
class ServerOptimizer:
    #: the server optimizer
    type: str = key("SGD", choices=("SGD", "Adam", "Adagrad", "Yogi"), fold=True)
    #: None: ``server_lr`` of the type; FederatedScope's default is 0.01 for all
    lr: float | None = key(None, above=0.0)
    #: further arguments: ``momentum``, ``betas``, …
    extra: dict = key({}, open=True)


@dataclass(frozen=True)
class FedOpt:
    #: take a step of a server optimizer instead of the mean
    use: bool = key(False)
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)


#: the values of ``lowrank.robust``
ROBUST = ("none", "median", "trimmed_mean", "norm_bound", "krum", "multi_krum")
#: those that take the weights of clients into account
ROBUST_WEIGHS = ("none", "norm_bound", "multi_krum")


#: those that accelerate knows
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def robust_needs(rule: str, malicious: int) -> int:
    """The number of updates that ``lowrank.robust = rule`` needs to withstand ``malicious`` clients.

    ``n > 2 f`` for a trimmed mean (Yin et al. 2018), ``n ≥ 2 f + 3`` for Krum (Blanchard et al. 2017).
    """
    return {"trimmed_mean": 2 * malicious + 1, "krum": 2 * malicious + 3, "multi_krum": 2 * malicious + 3}.get(rule, 1)


@dataclass(frozen=True)
class Lowrank:
    """Settings that FederatedScope has no key for. All other keys of this section belong to the method."""

    #: minimum number of usable updates in a round; with fewer, the run stops
    min_clients: int = key(1, min=1)
    #: the largest number of training samples that a client may declare; updates that declare more are refused
    max_samples: int = key(10**9, min=1)
    #: maximum norm of the difference between an update and what the client was sent; 0: off
    max_update_norm: float = key(0.0, min=0.0)
    #: the same, as a factor, 1 or more, of the median over the updates of the round; 0: off
    max_update_norm_factor: float = key(0.0, min=0.0)
    #: a mean that a few malicious clients cannot move far, in place of the weighted mean (``methods.robust``)
    robust: str = key("none", choices=ROBUST)
    #: number of malicious clients in a round that trimmed_mean, krum and multi_krum are to withstand
    robust_malicious: int = key(1, min=1)
    #: maximum norm of a client's change under norm_bound; 0: the median of the round
    robust_norm: float = key(0.0, min=0.0)
    #: what is added to the clients' objective so that they drift apart less, under any averaging method
    #: (``methods.drift``)
    drift: str = key("none", choices=("none", "fedprox", "scaffold", "feddyn"), later="none")
    #: mu of fedprox, alpha of feddyn
    drift_weight: float = key(0.01, min=0.0, later=0.01)
    #: if the server step fails or its result is not finite: stop the run, or skip the round
    on_bad_round: str = key("stop", choices=("stop", "skip"))
    #: probability that a selected client drops out of a round, drawn with the seed; tests the robustness of a method
    drop_rate: float = key(0.0, min=0.0, below=1.0)
    #: seconds that a process waits for another in distributed runs; on Flower, for the next answer of any node
    timeout: float = key(600.0, above=0.0, max=2e6, result=False)
    #: dtype of the frozen weights and of the computation, or `int8` or `nf4`: matrices quantised to 8 or 4 bits by
    #: bitsandbytes, which takes models of transformers and methods that leave the base as it is. Adapters
    #: are in float32 in any case; a head that is trained is in the dtype of the weights
    dtype: str = key("float32", choices=("float32", "bfloat16", *QUANTISED))
    #: dtype of the computation with quantised matrices, and of the weights that are not quantised
    compute_dtype: str = key("float32", choices=("float32", "bfloat16"))
    #: quantise the scales of `nf4`, too, which saves 0.4 bits for each weight
    double_quant: bool = key(False)
    #: normalisation of a ResNet; ``static`` is batch norm that uses the statistics of the batch in evaluation too
    norm: str = key("batch", choices=("batch", "static", "group", "none"))
    #: factor on the hidden widths of an image network
    width: float = key(1.0, above=0.0, max=8.0)
    #: a ``.safetensors`` file with the initial weights of an image network; empty: trained from scratch
    weights: str = key("")
    #: initialisation of layers with an adapter when training from scratch: random weights and a zero adapter, or zero
    #: weights and a pair of random matrices
    base_init: str = key("random", choices=("random", "zero"))
    #: train and send the head of a classifier; False: it stays as it began, and the adapter alone learns
    train_head: bool = key(True)
    #: what stays with its client beside what the method keeps there: `[head]` gives every client a head of its own,
    #: which is never sent
    personal: list[str] = key([], items=("head",), later=[])
    #: number of validation samples, at most, with which a method selects
    validation_samples: int = key(500, min=1)
    #: seed of the split into training and test data, for data without a test set; -1: the run's seed. A search and the
    #: runs that follow must use the same value; otherwise samples of the search are in their test sets
    test_seed: int = key(-1, min=-1)
    #: folder for the trained tensors of clients, which are reused if a client trains from the same start on the same
    #: data; empty: off
    reuse_clients: str = key("", result=False)
    #: also save the model with the adapter merged into it
    save_merged: bool = key(False, result=False)
    #: draw the pictures of a run, for which a classifier is evaluated once more on the test data at its end
    pictures: bool = key(True, result=False)
    #: trackers that are told the records of the run while it runs: accelerate's names; each has to be installed
    trackers: list[str] = key([], items=TRACKERS, result=False)
    #: rounds between checkpoints; 0: none
    checkpoint_freq: int = key(1, min=0, result=False)
    #: number of checkpoints in the folder
    keep_checkpoints: int = key(2, min=1, result=False)
    #: settings of some clients for themselves: a list such as ``[{clients: 3, batch_size: 4}, {clients: [5, "7-9"],
    #: lr_factor: 0.5}]``; or a file: a table (``.csv``, ``.tsv``) with a column ``client`` and a row for each client,
    #: or what FederatedScope's ``--client_cfg`` takes (``.yaml``)
    clients: list[dict] | str = key([], words="a list of mappings, or the name of a file")
    #: all hyperparameters of the method
    params: dict = key({}, open=True)
