//! The rendezvous of ranks that are threads. A newcomer that fits no world of the others is refused, and they go on.

use std::{thread, time::Duration};

use comm::{Collectives, Communicator, Quorum, Rendezvous, ThreadRendezvous};
use numcore::{NullRuntime, Result};

#[test]
fn newcomers_on_another_device_are_refused_and_the_others_go_on() {
    for ranks in [1, 2, 3] {
        let runtimes = (0..ranks).map(|_| NullRuntime::new()).collect();
        let (rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(20)).unwrap();
        // It never meets: it only sees who waits.
        let probe = rendezvous.join(NullRuntime::new());
        let newcomers = [1, 0, 2].map(|device| rendezvous.join(NullRuntime::on_device(device)));
        let (outcomes, joined): (Vec<Result<_>>, Vec<Result<_>>) = thread::scope(|scope| {
            let meet = |mut seat: comm::ThreadSeat<NullRuntime>| {
                scope.spawn(move || {
                    let world = seat.next_world()?;
                    world.comm.barrier()?;
                    Ok((world.generation, world.comm.size(), world.newcomers))
                })
            };
            let joined = newcomers.map(meet);
            // All of them wait before anybody of the first world comes.
            while probe.newcomers() < 3 {
                thread::yield_now();
            }
            let outcomes: Vec<_> = seats.into_iter().map(meet).collect();
            let of = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().unwrap();
            (outcomes.into_iter().map(of).collect(), joined.into_iter().map(of).collect())
        });
        let all_well: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
        assert_eq!(all_well, vec![(0, ranks + 1, 1); ranks]);
        let [unfit, fits, other] = &joined[..] else { panic!("{joined:?}") };
        assert_eq!(*fits.as_ref().unwrap(), (0, ranks + 1, 1));
        for refused in [unfit, other] {
            let told = refused.as_ref().unwrap_err().to_string();
            assert!(told.contains("all must be on one device"), "{told}");
        }
    }
}
