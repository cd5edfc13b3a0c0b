//! Deadlines by kind of call: the first call of a kind in a group, and the calls of a patient group, may take longer.

use comm::{Communicator, Deadlines, Patient, Ranks};
use numcore::ErrorKind;

use crate::faults::{TERMS, TIMEOUT, call, cpu};

#[test]
fn the_first_call_of_a_kind_and_those_of_the_patient_may_take_longer() {
    for kind in ["all_reduce", "barrier", "exchange", "send"] {
        let deadlines = Deadlines { call: TIMEOUT, first: 50 * TIMEOUT };
        let outcomes = Ranks::new(2).timeout(deadlines).outcomes(cpu, |comm| {
            let patient = Patient::over(&comm, 50 * TIMEOUT);
            // The last has the time of any call: the other rank is too late.
            for (k, comm) in [&comm, &patient, &comm].into_iter().enumerate() {
                if comm.rank() == 1 {
                    std::thread::sleep(2 * TIMEOUT);
                }
                call(comm, kind, TERMS).map_err(|error| error.within(format!("call {k}")))?;
            }
            Ok(())
        });
        for error in outcomes.unwrap().into_iter().map(|outcome| outcome.expect_err("too late")) {
            let ErrorKind::Timeout { missing, .. } = error.kind() else { panic!("{kind}: {error}") };
            assert!(missing[..] == [1] && error.path().starts_with("call 2"), "{kind}: {error}");
        }
    }
}
