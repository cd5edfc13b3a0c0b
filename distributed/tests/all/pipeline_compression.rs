//! Compressed gradients of a pipeline's stages: each replica sends what it sends of the whole model.

use crate::prelude::*;

const POWER: PowerSgd = PowerSgd { rank: 1, start_iter: 1, min_rate: 0.0, seed: 0 };
const KINDS: [(GradCompression, Option<PowerSgd>); 3] =
    [(GradCompression::Bf16, None), (GradCompression::F16, None), (GradCompression::Own, Some(POWER))];

/// Three steps of two replicas: of the whole model, or of stages with the same micro-batches.
fn way((compression, power): (GradCompression, Option<PowerSgd>)) -> Way {
    let way = Way { steps: 3, examples: 16, ..Way::gpt(2) };
    Way { buckets: BucketOptions { compression, ..Default::default() }, power, ..way }
}

fn whole(kind: (GradCompression, Option<PowerSgd>)) -> Way {
    let way = way(kind);
    Way { accumulation: 4, gpt: GptConfig { layers: 4, ..way.gpt }, ..way.over(&[(Axis::Data, 2)]) }
}

fn staged(compression: (GradCompression, Option<PowerSgd>), kind: ScheduleKind, v: usize) -> Way {
    let mut way = way(compression).staged(kind, v).over(&[(Axis::Pipe, 2), (Axis::Data, 2)]);
    way.gpt.layers = 4;
    Way { examples: 16, ..way }
}

#[test]
fn stages_send_what_the_whole_model_sends() {
    for compression in KINDS {
        let whole = whole(compression).outcome();
        let exact = self::whole((GradCompression::Own, None)).outcome();
        assert!(distance(&whole, &exact) > CLOSE, "{compression:?} rounds");
        for (kind, v) in [(ScheduleKind::OneFOneB, 1), (ScheduleKind::ZbH1, 1), (ScheduleKind::Interleaved, 2)] {
            staged(compression, kind, v).same_as(&whole);
        }
        // Two runs of two micro-batches each.
        let runs = staged(compression, ScheduleKind::OneFOneB, 1).micros(2);
        Way { accumulation: 2, ..runs }.same_as(&whole);
    }
}

#[test]
fn stages_resume_with_what_they_have_not_sent() {
    for compression in KINDS {
        let ways = [staged(compression, ScheduleKind::OneFOneB, 1), whole(compression)];
        let once = ways[1].outcome();
        for (first, then) in [(0, 0), (0, 1), (1, 0)] {
            let folder = Scratch::new("compression");
            ways[first].go_on(None, 0..2, Some(&folder.folder()));
            let rest = ways[then].go_on(Some(&folder.folder()), 2..3, None);
            let all = RunOutcome { losses: once.losses[2..].to_vec(), norms: once.norms[2..].to_vec(), ..once.clone() };
            let off = distance(&rest, &all);
            assert!(off <= CLOSE, "{compression:?}, {first} {then}: {off:e}");
        }
    }
}
