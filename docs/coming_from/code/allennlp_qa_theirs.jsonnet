local bert = 'bert-base-cased';
local epochs = 2;

{
  dataset_reader: {
    type: 'transformer_squad',
    transformer_model_name: bert,
    length_limit: 384,
    stride: 128,
  },
  train_data_path: 'train-v1.1.json',
  validation_data_path: 'dev-v1.1.json',
  vocabulary: { type: 'empty' },
  model: { type: 'transformer_qa', transformer_model_name: bert },
  data_loader: { batch_sampler: { type: 'bucket', batch_size: 16 } },
  trainer: {
    optimizer: {
      type: 'huggingface_adamw',
      lr: 2e-5,
      weight_decay: 0.01,
      parameter_groups: [[['bias', 'LayerNorm\\.weight', 'layer_norm\\.weight'], { weight_decay: 0 }]],
    },
    learning_rate_scheduler: { type: 'slanted_triangular', cut_frac: 0.1 },
    grad_norm: 1.0,
    num_epochs: epochs,
    validation_metric: '+per_instance_f1',
  },
  distributed: { cuda_devices: [0, 1] },
}
