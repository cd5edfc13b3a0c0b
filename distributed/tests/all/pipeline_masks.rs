//! Random numbers of a pipeline: every stage and micro-batch draws its own.

use distributed::pipeline::split;

use crate::{pipeline_common::*, prelude::*};

#[test]
fn every_stage_and_micro_batch_draws_its_own_dropout_mask() {
    const SIZE: usize = 512;
    for (kind, p, v, m) in
        [(ScheduleKind::OneFOneB, 2, 1, 4), (ScheduleKind::Interleaved, 2, 2, 4), (ScheduleKind::Zbv, 2, 2, 4)]
    {
        let checked = checked(kind, p, v, m).unwrap();
        let stages = p * v;
        let outputs = world(p, |comm| {
            let layers = (0..stages).map(|_| Ok(Box::new(Dropout::new(0.5)?) as Box<dyn Forward<Cpu>>));
            let layers = layers.collect::<Result<Vec<_>>>()?;
            let cuts: Vec<usize> = (1..stages).collect();
            let all: Vec<Box<dyn Stage<Cpu>>> = split(layers, &cuts)?;
            let mut pipeline = pipeline(&comm, &checked, all)?;
            let ones = Tensor::ones(comm.runtime(), [m, SIZE], DType::F32)?;
            let output = pipeline.evaluate(MicroBatches::split(from_ref(&ones), from_ref(&ones), m)?)?;
            output.outputs().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()
        });
        let outputs: Vec<Vec<f32>> = outputs.into_iter().flatten().collect();
        assert_eq!(outputs.len(), m);
        for values in &outputs {
            // Of independent masks 2⁻ˢ of the elements are left; of equal ones a half.
            let left = values.iter().filter(|&&v| v != 0.0).count() as f64 / SIZE as f64;
            let due = 0.5f64.powi(stages as i32);
            let spread = 6.0 * (due * (1.0 - due) / SIZE as f64).sqrt();
            assert!((left - due).abs() < spread, "{kind}: {left} of the elements are left, {due} are due");
        }
        let different: BTreeSet<Vec<u32>> = outputs.iter().map(|o| o.iter().map(|v| v.to_bits()).collect()).collect();
        assert_eq!(different.len(), m, "{kind}: two micro-batches have one mask");
    }
}
