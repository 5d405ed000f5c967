{
  dataset_reader: { type: 'points' },
  train_data_path: 'train',
  validation_data_path: 'test',
  model: { type: 'points' },
  data_loader: { batch_size: 16, shuffle: true },
  trainer: {
    optimizer: { type: 'adamw', lr: 0.01 },
    num_epochs: 3,
    num_gradient_accumulation_steps: 2,
    grad_norm: 1.0,
    validation_metric: '+accuracy',
  },
  random_seed: 0,
  numpy_seed: 0,
  pytorch_seed: 0,
  distributed: { cuda_devices: [0, 1] },
}
