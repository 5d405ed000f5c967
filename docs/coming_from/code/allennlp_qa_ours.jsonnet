local examples = '../../../examples/';

{
  search_path: examples + 'question_answering',
  task: {
    class_path: 'question_answering.QuestionAnswering',
    init_args: {
      pretrained: 'bert-base-cased',
      windows: { max_tokens: 384, overlap: 128 },
      folder: 'data/squad',
    },
  },
  batch: { global_batch_size: 32, micro_batch_size: 16 },
  data: { order: 'bucketed' },
  optimizer: {
    class_path: 'torch.optim.AdamW',
    init_args: { lr: 2e-5, weight_decay: 0.01 },
    parameter_groups: [[['bias', 'LayerNorm\\.weight'], { weight_decay: 0.0 }]],
  },
  scheduler: { name: 'linear', warmup: 0.1 },
  train: { epochs: 2, max_grad_norm: 1.0, run_dir: 'runs/squad' },
  evaluate: { best: 'held_out/squad/f1' },
  distributed: { devices: 2, equality: 'exact' },
}
