"""FederatedScope's other keys: the ones that the typed sections of ``config.py`` do not hold.

Names and defaults as branch ``llm`` (7f086944) has them, so that its files load unchanged. What the local engine
makes of each: nothing at the default; nothing either if the key is inert or harmless; else it is refused.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

_SECTIONS = {
    "": {
        "backend": "torch", "check_completeness": False, "print_decimal_digits": 6, "cfg_file": "",
        "expname_tag": "",
    },
    "hpo": {
        "trial_index": 0, "working_folder": "hpo", "ss": "", "num_workers": 0, "init_cand_num": 16,
        "larger_better": False, "scheduler": "rs", "metric": "client_summarized_weighted_avg.val_loss",
    },
    "hpo.sha": {"elim_rate": 3, "budgets": [], "iter": 0},
    "hpo.pbt": {"max_stage": 5, "perf_threshold": 0.1},
    "hpo.fedex": {
        "use": False, "ss": "", "flatten_ss": True, "eta0": -1.0, "sched": "auto", "cutoff": 0.0, "gamma": 0.0,
        "diff": False, "psn": False, "pi_lr": 0.01,
    },
    "hpo.table": {"eps": 0.1, "num": 27, "idx": 0},
    "hpo.fts": {
        "use": False, "ss": "", "target_clients": [], "diff": False, "local_bo_max_iter": 50, "local_bo_epochs": 50,
        "fed_bo_max_iter": 50, "ls": 1.0, "var": 0.1, "g_var": 1e-06, "v_kernel": 1.0, "obs_noise": 1e-06, "M": 100,
        "M_target": 200, "gp_opt_schedule": 1, "allow_load_existing_info": True,
    },
    "hpo.pfedhpo": {
        "use": False, "discrete": False, "train_fl": False, "train_anchor": False, "ss": "",
        "target_fl_total_round": 1000,
    },
    "nbafl": {"use": False, "mu": 0.0, "epsilon": 100.0, "w_clip": 1.0, "constant": 30.0},
    "sgdmf": {"use": False, "R": 5.0, "epsilon": 4.0, "delta": 0.5, "constant": 1.0},
    "quantization": {"method": "none", "nbits": 8},
    "data": {
        "save_data": False, "server_holds_all": False, "consistent_label_distribution": True,
        "cSBM_phi": [0.5, 0.5, 0.5], "target_transform": [], "pre_transform": [],
        "val_target_transform": [], "val_pre_transform": [], "test_target_transform": [], "test_pre_transform": [],
        "file_path": "", "hetero_data_name": [],
        "num_of_client_for_data": [], "max_seq_len": 384, "max_tgt_len": 128, "max_query_len": 128,
        "trunc_stride": 128, "cache_dir": "", "hetero_synth_batch_size": 32, "hetero_synth_prim_weight": 0.5,
        "hetero_synth_feat_dim": 128, "num_contrast": 0, "is_debug": False, "loader": "", "batch_size": 64,
        "shuffle": True, "num_workers": 0, "drop_last": False, "walk_length": 2, "num_steps": 30, "sizes": [10, 5],
    },
    "data.quadratic": {"dim": 1, "min_curv": 0.02, "max_curv": 12.5},
    "dataloader": {
        "type": "base", "pin_memory": False, "walk_length": 2, "num_steps": 30, "sizes": [10, 5], "theta": -1,
    },
    "feat_engr": {
        "type": "", "scenario": "hfl", "num_bins": 5, "selec_threshold": 0.05, "selec_woe_binning": "quantile",
    },
    "feat_engr.secure": {"type": "encrypt", "key_size": 3072},
    "feat_engr.secure.encrypt": {"type": "dummy"},
    "trainer": {"type": "general", "disp_freq": 50, "val_freq": 100000000},
    "trainer.sam": {"adaptive": False, "rho": 1.0, "eta": 0.0},
    "trainer.local_entropy": {"gamma": 0.03, "inc_factor": 1.0, "eps": 0.0001, "alpha": 0.75},
    "train": {"data_para_dids": []},
    "finetune": {
        "before_eval": False, "local_update_steps": 1, "batch_or_epoch": "epoch", "freeze_param": "",
        "simple_tuning": False, "epoch_linear": 10, "lr_linear": 0.005, "weight_decay": 0.0, "local_param": [],
    },
    "finetune.optimizer": {"type": "SGD", "lr": 0.1},
    "finetune.scheduler": {"type": "", "warmup_ratio": 0.0},
    "aggregator": {
        "robust_rule": "fedavg", "byzantine_node_num": 0, "num_agg_groups": 1, "num_agg_topk": [],
        "inside_weight": 1.0, "outside_weight": 0.0,
    },
    "attack": {
        "attack_method": "", "target_label_ind": -1, "attacker_id": -1, "edge_path": "edge_data/",
        "trigger_path": "trigger/", "setting": "fix", "freq": 10, "insert_round": 100000, "mean": [0.9637],
        "std": [0.1592], "trigger_type": "edge", "label_type": "dirty", "edge_num": 100, "poison_ratio": 0.5,
        "scale_poisoning": False, "scale_para": 1.0, "pgd_poisoning": False, "pgd_lr": 0.1, "pgd_eps": 2,
        "self_opt": False, "self_lr": 0.05, "self_epoch": 6, "reconstruct_lr": 0.01, "reconstruct_optim": "Adam",
        "info_diff_type": "l2", "max_ite": 400, "alpha_TV": 0.001, "alpha_prop_loss": 0,
        "classifier_PIA": "randomforest", "inject_round": 0, "mia_simulate_in_round": 20,
        "mia_is_simulate_in": False,
    },
    "federate": {
        "client_idx_for_local_train": 0, "unseen_clients_rate": 0.0, "data_weighted_aggr": False, "use_diff": False,
        "merge_val_data": False, "save_client_model": False, "join_in_info": [], "resource_info_file": "",
        "master_addr": "127.0.0.1", "master_port": 29500, "atc_vanilla": False, "atc_load_from": "",
    },
    "distribute": {
        "use": False, "server_host": "0.0.0.0", "server_port": 50050, "client_host": "0.0.0.0",
        "client_port": 50050, "role": "client", "data_file": "data", "data_idx": -1,
        "grpc_max_send_message_length": 314572800, "grpc_max_receive_message_length": 314572800,
        "grpc_enable_http_proxy": False, "grpc_compression": "nocompression",
    },
    "vertical": {
        "use": False, "mode": "feature_gathering", "dims": [5, 10], "encryption": "paillier", "key_size": 3072,
        "algo": "lr", "feature_subsample_ratio": 1.0, "protect_object": "", "protect_method": "",
        "protect_args": [], "eval_protection": "", "data_size_for_debug": 0,
    },
    "adapter": {"use": False, "args": []},
    "asyn": {
        "use": False, "time_budget": 0, "min_received_num": 2, "min_received_rate": -1.0, "staleness_toleration": 0,
        "staleness_discount_factor": 1.0, "aggregator": "goal_achieved", "broadcast_manner": "after_aggregating",
        "overselection": False,
    },
    "fedprox": {"use": False, "mu": 0.0},
    "fedswa": {"use": False, "freq": 10, "start_rnd": 30},
    "personalization": {
        "local_param": [], "share_non_trainable_para": False, "local_update_steps": -1, "regular_weight": 0.1,
        "lr": 0.0, "K": 5, "beta": 1.0, "lr_feature": 0.1, "lr_linear": 0.1, "epoch_feature": 1, "epoch_linear": 2,
        "weight_decay": 0.0,
    },
    "fedsageplus": {
        "num_pred": 5, "gen_hidden": 128, "hide_portion": 0.5, "fedgen_epoch": 200, "loc_epoch": 1, "a": 1.0,
        "b": 1.0, "c": 1.0,
    },
    "gcflplus": {"EPS_1": 0.05, "EPS_2": 0.1, "seq_length": 5, "standardize": False},
    "flitplus": {"tmpFed": 0.5, "lambdavat": 0.5, "factor_ema": 0.8, "weightReg": 1.0},
    "eval": {"monitoring": []},
    "wandb": {"use": False, "name_user": "", "name_project": "", "online_track": True, "client_train_info": False},
    "model": {
        "model_num_per_trainer": 1, "hidden": 256, "dropout": 0.5, "in_channels": 0,
        "out_channels": 1, "layer": 2, "graph_pooling": "mean", "embed_size": 8, "num_item": 0, "num_user": 0,
        "input_shape": [], "lambda_": 0.1, "gamma": 0, "num_of_trees": 10, "max_tree_depth": 3, "stage": "",
        "model_type": "google/bert_uncased_L-2_H-128_A-2", "pretrain_tasks": [], "downstream_tasks": [],
        "num_labels": 1, "max_length": 200, "min_length": 1, "no_repeat_ngram_size": 3, "length_penalty": 2.0,
        "num_beams": 5, "label_smoothing": 0.1, "n_best_size": 20, "max_answer_len": 30,
        "null_score_diff_threshold": 0.0, "use_contrastive_loss": False, "contrast_topk": 100, "contrast_temp": 1.0,
    },
    "criterion": {"type": "MSELoss"},
    "regularizer": {"type": "", "mu": 0.0},
    "llm.deepspeed": {"use": False, "ds_config": ""},
    "llm.offsite_tuning": {
        "use": False, "strategy": "drop_layer", "kwargs": [{}], "emu_l": 1, "emu_r": 10, "eval_type": "emu",
    },
    "llm.offsite_tuning.emu_align": {"use": False, "restore_from": "", "save_to": "", "exit_after_align": False},
    "llm.offsite_tuning.emu_align.data": {"root": "data", "type": "alpaca@llm", "splits": [0.8, 0.1, 0.1]},
    "llm.offsite_tuning.emu_align.train": {
        "local_update_steps": 10, "batch_or_epoch": "batch", "lm_loss_weight": 0.1, "kd_loss_weight": 0.9,
    },
    "llm.offsite_tuning.emu_align.train.optimizer": {"type": "SGD", "lr": 0.01},
}

#: dotted name -> FederatedScope's default
DEFAULTS = {f"{section}.{key}".lstrip("."): value
            for section, keys in _SECTIONS.items() for key, value in keys.items()}

#: sections that take any further key
OPEN = ("aggregator.BFT_args", "finetune.optimizer", "finetune.scheduler", "feat_engr.secure.dp",
        "llm.offsite_tuning.emu_align.train.optimizer")

#: keys and sections that decide nothing about the result of a run in one process
HARMLESS = ("check_completeness", "print_decimal_digits", "cfg_file", "expname_tag", "wandb", "distribute",
            "hpo.trial_index", "hpo.working_folder", "hpo.ss", "hpo.num_workers", "hpo.init_cand_num",
            "hpo.larger_better", "hpo.scheduler", "hpo.metric", "hpo.sha", "hpo.pbt", "hpo.table",
            "dataloader.pin_memory", "data.cache_dir", "federate.master_addr", "federate.master_port",
            "trainer.disp_freq", "train.data_para_dids", "eval.monitoring",
            # read by methods or trainers that bear these names only
            "fedsageplus", "gcflplus", "flitplus", "trainer.sam", "trainer.local_entropy", "data.quadratic")

#: values that say what the local engine does anyway
SAME_AS_OURS = {
    "trainer.type": ("general", "llmtrainer", "cvtrainer", "nlptrainer", "torchtrainer"),
    "criterion.type": ("CrossEntropyLoss",),
    "model.model_num_per_trainer": (1,),
}

#: a section does nothing while this key is at its default (for the rest, while its key ``use`` is)
SWITCHES = {"attack": "attack.attack_method", "feat_engr": "feat_engr.type", "quantization": "quantization.method",
            "regularizer": "regularizer.type", "aggregator": "aggregator.robust_rule",
            "finetune": "finetune.before_eval", "personalization": "personalization.local_param"}

#: a method of FederatedScope, and what it is here once ``llm.adapter.use`` is True
WITH_ADAPTERS = {"fedavg": "fedlora"}


def within(name: str, sections: Iterable[str]) -> bool:
    """True if ``name`` is one of ``sections`` or lies inside one."""
    return any(name == s or name.startswith(s + ".") for s in sections)


def inert(name: str, given: Mapping[str, object]) -> bool:
    """True if ``given`` leaves a part of the framework to which ``name`` belongs turned off."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        section = ".".join(parts[:end])
        key = SWITCHES.get(section, f"{section}.use")
        if key in DEFAULTS and key != name and given.get(key, DEFAULTS[key]) == DEFAULTS[key]:
            return True
    return False


def decides_nothing(name: str, given: Mapping[str, object]) -> bool:
    """True if a run in one process ends the same with or without ``given[name]``."""
    return within(name, HARMLESS) or inert(name, given) or given[name] in SAME_AS_OURS.get(name, ())
