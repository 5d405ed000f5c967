{
  task: { class_path: 'points.Points' },
  batch: { global_batch_size: 64, micro_batch_size: 16 },
  optimizer: {
    class_path: 'torch.optim.AdamW',
    init_args: { lr: 0.01 },
  },
  train: {
    epochs: 3,
    max_grad_norm: 1.0,
    seed: 0,
    run_dir: 'runs/points',
  },
  evaluate: { best: 'test/accuracy' },
  distributed: { devices: 2, equality: 'exact' },
}
