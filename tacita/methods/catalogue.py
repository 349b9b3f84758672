"""What every preset is for, in a sentence, and which paper it comes from."""

from __future__ import annotations

from dataclasses import dataclass

F3CREC = "F3CRec (federated continual recommendation)"
FEDSHARE = "FedShare (personal sharing and unlearning)"
FEDKDREC = "FedKDRec (prediction transfer with learned agents)"
LIPM = "LIPM + DPPS (interest-guided aggregation, personal differential privacy)"
BASELINE = "a baseline of federated learning"
OURS = "tacita"


@dataclass(frozen=True)
class MethodInfo:
    """The paper that a preset comes from, or is compared with, and what it does."""

    paper: str
    about: str


METHODS: dict[str, MethodInfo] = {
    "fedavg": MethodInfo(BASELINE, "devices train, the server averages what moved"),
    "ft": MethodInfo(F3CREC, "FedAvg, fine-tuned on each block of time"),
    "f3crec": MethodInfo(F3CREC, "adaptive replay on the device, item-wise temporal mean on the server"),
    "f3crec-no-client": MethodInfo(F3CREC, "ablation: no replay on the device"),
    "f3crec-no-server": MethodInfo(F3CREC, "ablation: no temporal mean on the server"),
    "f3crec-fixed-replay": MethodInfo(F3CREC, "ablation: everybody replays the same share"),
    "f3crec-uniform-mean": MethodInfo(F3CREC, "ablation: one weight for all items in the temporal mean"),
    "f3crec-dpps": MethodInfo(F3CREC, "F3CRec with a privacy budget for each person"),
    "reg": MethodInfo(F3CREC, "baseline: item rows are held near those of the last block"),
    "kd": MethodInfo(F3CREC, "baseline: devices distil the scores of the last block"),
    "rlp2": MethodInfo(F3CREC, "baseline: devices replay what they got wrong"),
    "spp": MethodInfo(F3CREC, "baseline: proxies stand for the items of earlier blocks"),
    "fedshare": MethodInfo(FEDSHARE, "the server learns from the graph of what people share, and unlearns by contrast"),
    "fedshare-no-cl": MethodInfo(FEDSHARE, "ablation: without the contrastive agreement in learning"),
    "fedshare-no-bpr": MethodInfo(FEDSHARE, "ablation: without the server's ranking loss"),
    "fedshare-local": MethodInfo(FEDSHARE, "control: nobody learns from what is shared"),
    "fedshare-fedavg": MethodInfo(FEDSHARE, "the server learns from what is shared as one client more"),
    "fedshare-rounds": MethodInfo(FEDSHARE, "control: shared data is only trained over, by rounds on what remains"),
    "fedshare-rollback": MethodInfo(FEDSHARE, "FedShare; contrast begins at an earlier table and resets rows"),
    "fedshare-retrain": MethodInfo(FEDSHARE, "FedShare's learning; shared data is forgotten by retraining, exactly"),
    "fedshare-fru": MethodInfo(FEDSHARE, "FedShare's learning; forgets by replaying every round (FRU)"),
    "fedshare-cufru": MethodInfo(FEDSHARE, "FedShare's learning; forgets by asking few devices (CUFRU)"),
    "fedshare-cfru": MethodInfo(FEDSHARE, "FedShare's learning; forgets by taking logged updates back (CFRU)"),
    "fedshare-decoupled": MethodInfo(FEDSHARE, "shared data is learned in shards of its own, and forgotten exactly"),
    "fedshare-replay": MethodInfo(FEDSHARE, "forgets by replaying the run on the server; no device is asked"),
    "fedshare-dpps": MethodInfo(FEDSHARE, "FedShare with a privacy budget for each person"),
    "cdcgnnfed": MethodInfo(FEDSHARE, "baseline: shared data and likely links, mended as a graph"),
    "pdc-frs": MethodInfo(FEDSHARE, "baseline: shared items leave the device perturbed"),
    "retrain": MethodInfo(FEDSHARE, "forgets by retraining from the start, exactly"),
    "fru": MethodInfo(FEDSHARE, "forgets by replaying every round with devices"),
    "cufru": MethodInfo(FEDSHARE, "forgets by replaying rounds with few devices"),
    "cfru": MethodInfo(FEDSHARE, "forgets by taking back what the server logged of each client"),
    "retraction": MethodInfo(OURS, "who leaves takes its share of the table along, in a sum over all who leave"),
    "fedkdrec": MethodInfo(FEDKDREC, "devices keep their models and send disguised predictions to a server model"),
    "fedkdrec-no-mix": MethodInfo(FEDKDREC, "ablation: predictions are not mixed"),
    "fedkdrec-no-weights": MethodInfo(FEDKDREC, "ablation: no agent weighs the devices"),
    "fedkdrec-no-picks": MethodInfo(FEDKDREC, "ablation: no agent picks the samples"),
    "fedkdrec-confident": MethodInfo(FEDKDREC, "variant: the most confident samples are picked"),
    "ptf-fedrec": MethodInfo(FEDKDREC, "baseline: prediction transfer without agents"),
    "ptf-fedrec-inframe": MethodInfo(FEDKDREC, "PTF-FedRec inside FedKDRec's frame"),
    "fedmf-kd": MethodInfo(FEDKDREC, "baseline: parameters of matrix factorisation travel"),
    "fedncf-kd": MethodInfo(FEDKDREC, "baseline: parameters of NCF travel"),
    "fedpergnn": MethodInfo(FEDKDREC, "baseline: a third party matches users with the same items"),
    "lipm": MethodInfo(LIPM, "clients count by how near their interests are to everybody's; 50 silos"),
    "lipm-gated": MethodInfo(LIPM, "variant: interests scale what changes"),
    "lipm-learned": MethodInfo(LIPM, "variant: the weights of clients are learned"),
    "lipm-dpps": MethodInfo(LIPM, "LIPM with a privacy budget for each person, every person a client"),
    "fedrec": MethodInfo(LIPM, "baseline: real ratings hidden among made-up ones"),
    "fedmf-he": MethodInfo(LIPM, "baseline: exact sums, as homomorphic encryption would give"),
    "fedneumf": MethodInfo(LIPM, "baseline: NeuMF in silos"),
    "pfedme": MethodInfo(LIPM, "baseline: personal models held near the common one"),
    "dpps": MethodInfo(LIPM, "a privacy budget for each person: updates are clipped and noised to fit it"),
    "dp-fedavg": MethodInfo(BASELINE, "people are drawn by chance, updates clipped, one noise covers the sum"),
}
"""Preset -> what it is; methods of others that are imported have no entry here."""
