//! A job of several processes that is killed while it saves.

use super::*;

/// Goes on from the last checkpoint, and saves every step.
pub fn train(comm: &Comm<Cpu>, steps: usize) -> Result<()> {
    let folder = Folder::new(env::var(FOLDER).expect("the test names a folder"));
    let rt = comm.runtime();
    let model = nn::Linear::new(&nn::Init::new(rt, 3), 64, 64)?;
    let mut step = TrainStep::builder(comm, &model).optimizer(optim::AdamWConfig::default()).build()?;
    let x = autograd::Var::new(Tensor::uniform(rt, [8, 64], DType::F32, -1.0, 1.0, 5)?);
    let loaded = step.load(&folder)?.is_some();
    if comm.rank() == 0 {
        println!("begins with a checkpoint: {loaded}, at step {}", step.global_step());
    }
    for _ in 0..steps {
        step.step(|_| Ok(Loss::mean(model.forward(&x)?.square()?.mean_all()?)))?;
        step.save(&folder, &CheckpointNotes::new())?;
        if comm.rank() == 0 {
            println!("saved step {}", step.global_step());
        }
    }
    Ok(())
}

/// A process dies at a random time; the last complete checkpoint is loaded by another number of processes.
pub fn a_job_killed_while_it_saves_resumes_at_another_size() {
    with_seeds(|seed| {
        let folder = env::temp_dir().join(format!("weftgrad-killed-{}-{seed}", std::process::id()));
        let variables = [(SEED, seed.to_string()), (FOLDER, folder.display().to_string())];
        let (killed, first, _) = job("save", 3, &[], &variables);
        assert!(!killed.status.success(), "{first}");
        let saved = |text: &str| text.lines().filter_map(|l| l.strip_prefix("saved step ")?.parse::<u64>().ok()).max();
        let last = saved(&first);
        for ranks in [2, 1] {
            let (output, text, _) = job("resume", ranks, &[], &variables);
            assert!(output.status.success(), "seed {seed}:\n{first}\n{text}");
            if ranks == 2 {
                // The last step that rank 0 named, or the next, which it was about to name.
                let from = saved(&text).expect("three steps were saved") - 3;
                assert!((last.unwrap_or(0)..=last.unwrap_or(0) + 1).contains(&from), "{first}\n{text}");
            }
        }
        fs::remove_dir_all(&folder).expect("checkpoints were saved");
    });
}

/// Kills the lost rank's process some milliseconds from now, whatever it does then.
pub fn killed_later(comm: &Comm<Cpu>) {
    if comm.rank() == LOST {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(5 + 13 * seed() as u64 % 200));
            signal("KILL")
        });
    }
}
