//! Events of elastic runs, drawn from seeds.

use distributed::comm::Fault;
use numcore::rng::Philox;

/// Steps of a run.
pub const LENGTH: u64 = 5;

/// The events of one run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub ranks: usize,
    /// Data parallelism, its canonical order, and the stages of ZeRO.
    pub how: u64,
    pub commit: u64,
    pub save: u64,
    pub in_thread: bool,
    pub averages: bool,
    /// By seat: in which world which call goes wrong.
    pub faults: Vec<Vec<(u64, u64, Fault)>>,
    /// By seat: which change to the file system ends a save.
    pub change: Vec<Option<u64>>,
    /// At which steps ranks come.
    pub joins: Vec<u64>,
}

impl Plan {
    pub fn seeded(seed: u64) -> Plan {
        let mut random = Philox::new(seed, 0);
        let ranks = 3 + random.below(2) as usize;
        let mut plan = Plan {
            ranks,
            how: random.below(5),
            commit: 1 + random.below(4),
            save: 1 + random.below(4),
            in_thread: random.below(2) == 0,
            averages: random.below(3) == 0,
            faults: vec![Vec::new(); ranks + 2],
            change: vec![None; ranks + 2],
            joins: (0..random.below(3)).map(|_| random.below(LENGTH)).collect(),
        };
        let fault = |random: &mut Philox| if random.below(2) == 0 { Fault::Error } else { Fault::Panic };
        let call = |random: &mut Philox| {
            let most = [40, 120, 250][random.below(3) as usize];
            random.below(most)
        };
        let seat = random.below(ranks as u64) as usize;
        let first = (0, call(&mut random), fault(&mut random));
        match random.below(5) {
            0 => plan.faults[seat].push(first),
            // Two at once, or about so.
            1 => [seat, (seat + 1) % ranks].into_iter().for_each(|seat| plan.faults[seat].push(first)),
            // One, and one of the next world, perhaps while it takes up the commit.
            2 => {
                plan.faults[seat].push(first);
                plan.faults[(seat + 2) % ranks].push((1, call(&mut random) / 3, fault(&mut random)));
            }
            // In a save, most changes being those of rank 0; or in a thread while others have committed what comes
            // after.
            3 => {
                plan.change[if random.below(2) == 0 { 0 } else { seat }] = Some(random.below(25));
                (plan.in_thread, plan.commit) = (true, 1);
            }
            _ => {
                plan.faults[seat].push(first);
                plan.change[0] = Some(random.below(25));
            }
        }
        // A newcomer that goes wrong, in whichever world takes it in: of more than two that are lost at once, copies
        // may be lost too.
        let others = plan.faults.iter().filter(|own| !own.is_empty()).count() + plan.change.iter().flatten().count();
        if random.below(2) == 0 && others == 1 {
            let newcomer = (call(&mut random) / 3, fault(&mut random));
            plan.faults[ranks] = (1..10).map(|world| (world, newcomer.0, newcomer.1)).collect();
        }
        plan
    }
}
