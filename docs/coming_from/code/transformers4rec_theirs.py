"""Next-item recommendation with Transformers4Rec; torch.distributed.launch starts it on several GPUs."""

from transformers4rec import torch as tr
from transformers4rec.config.trainer import T4RecTrainingArguments
from transformers4rec.torch.ranking_metric import MeanReciprocalRankAt, NDCGAt, RecallAt

LONGEST, WIDTH = 20, 32

# The schema tags the column of items, and says that they are numbered up to 120.
schema = tr.Schema().from_json("sessions/schema.json")
inputs = tr.TabularSequenceFeatures.from_schema(
    schema, max_sequence_length=LONGEST, d_output=WIDTH, masking="causal"
)
transformer = tr.GPT2Config.build(d_model=WIDTH, n_head=4, n_layer=2, total_seq_length=LONGEST, dropout=0.2)
body = tr.SequentialBlock(
    inputs, tr.MLPBlock([WIDTH]), tr.TransformerBlock(transformer, masking=inputs.masking)
)
metrics = [metric(top_ks=[10], labels_onehot=True) for metric in (RecallAt, NDCGAt, MeanReciprocalRankAt)]
task = tr.NextItemPredictionTask(weight_tying=True, metrics=metrics)
model = tr.Model(tr.Head(body, task, inputs=inputs))

arguments = T4RecTrainingArguments(
    output_dir="output",
    data_loader_engine="merlin",
    max_sequence_length=LONGEST,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=128,
    num_train_epochs=2,
    learning_rate=2e-3,
    lr_scheduler_type="constant",
    dataloader_drop_last=False,
    report_to=[],
)
trainer = tr.Trainer(
    model=model,
    args=arguments,
    schema=schema,
    train_dataset_or_path="sessions/train/000.parquet",
    eval_dataset_or_path="sessions/held_out/000.parquet",
    compute_metrics=True,
)
trainer.train()
print(trainer.evaluate(metric_key_prefix="eval"))
