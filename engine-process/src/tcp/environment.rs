//! The address and the name of a job, as launchers give them in environment variables.

use numcore::{Error, Result};

use super::Tcp;
use crate::Launch;

/// The first of the ports that jobs get by their name, and their number.
const PORTS: (u32, u32) = (15_000, 10_000);

impl Tcp {
    /// Reads variables as [`from_env`](Tcp::from_env) does, from any source. Rank and size come as in
    /// [`Launch::from_lookup`].
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` are the address, as torchrun sets them; where torchrun itself listens at that
    /// port, the next one is used. Without them, the host is the first of Slurm's job, or this machine if it has all
    /// processes. The port then comes from the name of the job.
    ///
    /// `WEFTGRAD_JOIN_ADDRESS` is the address, `host:port` with a port of its own, at which processes join the running
    /// job; an empty one counts as none. One with `WEFTGRAD_NEWCOMER=1` does, and has its rank from the job. A process
    /// makes the file `WEFTGRAD_MEMBER_FILE`, if that is set, once it is in a world of such a job.
    ///
    /// # Errors
    /// An error that names the variables to set, if these do not give an address or a rank. Also if a newcomer has no
    /// address to join at.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let unknown = |field, why: &str| Error::config("Tcp::from_lookup", field, why);
        let launch = Launch::from_lookup(&get).ok_or_else(|| {
            unknown(
                "launch",
                "no launcher has started this process: start all with `weftgrad-run -n N PROGRAM`, or set RANK, WORLD_SIZE and LOCAL_RANK, with ranks from 0",
            )
        })?;
        let port = get("MASTER_PORT").map(|port| port.parse::<u16>());
        let port = port.transpose().map_err(|_| unknown("address", "MASTER_PORT is not a port"))?;
        let is_taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let name = job(&get);
        let port = match (port, &name) {
            (Some(port), _) => port.saturating_add(u16::from(is_taken)),
            (None, Some(name)) => (PORTS.0 + crc32fast::hash(name.as_bytes()) % PORTS.1) as u16,
            (None, None) => return Err(unknown("address", ADDRESS)),
        };
        let join_address = get("WEFTGRAD_JOIN_ADDRESS").filter(|address| !address.is_empty());
        let member_file = get("WEFTGRAD_MEMBER_FILE").filter(|file| !file.is_empty()).map(Into::into);
        let is_newcomer = get("WEFTGRAD_NEWCOMER").is_some_and(|value| value == "1");
        if is_newcomer && join_address.is_none() {
            return Err(unknown("join address", NO_JOIN_ADDRESS));
        }
        let host = get("MASTER_ADDR").or_else(|| host(&get)).ok_or_else(|| unknown("address", ADDRESS))?;
        // An address of IPv6 has colons of its own.
        let is_v6 = host.contains(':') && !host.starts_with('[');
        let address = if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Ok(Tcp { job: name, join_address, member_file, is_newcomer, ..Tcp::at(address).launch(launch) })
    }
}

const ADDRESS: &str = "the address at which processes meet is unknown: set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port of it";

const NO_JOIN_ADDRESS: &str = "WEFTGRAD_NEWCOMER=1 asks to join a running job: set WEFTGRAD_JOIN_ADDRESS to the address that its ranks have there, or unset WEFTGRAD_NEWCOMER";

/// The name that a launcher gives to the job, which no other job of its has.
pub(super) fn job(get: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let steps = || Some(format!("{}.{}", get("SLURM_JOB_ID")?, get("SLURM_STEP_ID")?));
    get("TORCHELASTIC_RUN_ID")
        .or_else(|| get("PMIX_NAMESPACE"))
        .or_else(|| get("OMPI_MCA_ess_base_jobid"))
        .or_else(steps)
}

/// Tells whether the launcher has started processes on several machines.
pub(super) fn spans_hosts(get: &impl Fn(&str) -> Option<String>) -> bool {
    let counts = ["GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES"].map(|name| get(name)?.parse::<usize>().ok());
    counts.into_iter().flatten().any(|machines| machines > 1)
}

/// The host of rank 0, as Slurm and Open MPI tell it.
fn host(get: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let size = get("OMPI_COMM_WORLD_SIZE");
    if get("SLURM_STEP_NUM_NODES").is_some_and(|nodes| nodes == "1")
        || (size.is_some() && size == get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    {
        return Some("127.0.0.1".into());
    }
    first_host(&get("SLURM_STEP_NODELIST")?)
}

/// The first host of a list such as `gpu[03-07,11]-ib,login`.
fn first_host(list: &str) -> Option<String> {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().filter(|host| !host.is_empty()).map(Into::into);
    };
    let (numbers, rest) = rest.split_once(']')?;
    let number = numbers.split([',', '-']).next()?;
    first_host(&format!("{prefix}{number}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Tcp> {
        Tcp::from_lookup(|name| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| value.to_string()))
    }

    fn place(variables: &[(&str, &str)]) -> (String, Option<String>, (usize, usize)) {
        let tcp = of(variables).unwrap();
        let (rank, size, _) = tcp.place.unwrap();
        (tcp.address, tcp.job, (rank.unwrap(), size))
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "a run"),
    ];
    const SLURM: [(&str, &str); 6] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "gpu[03-07,11],login"),
    ];
    const MPIRUN: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-1@1"),
    ];

    #[test]
    fn torchrun_gives_the_address() {
        assert_eq!(place(&TORCHRUN), ("node-1:29500".into(), Some("a run".into()), (1, 4)));
        let listens = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(place(&listens).0, "node-1:29501");
        let v6 = [&[("MASTER_ADDR", "fe80::1")], &TORCHRUN[..]].concat();
        assert_eq!(place(&v6).0, "[fe80::1]:29500");
        assert!(of(&TORCHRUN[..3]).unwrap_err().to_string().contains("set MASTER_ADDR"));
        let wrong = [&[("MASTER_PORT", "70000")], &TORCHRUN[..]].concat();
        assert!(of(&wrong).unwrap_err().to_string().contains("MASTER_PORT is not a port"));
    }

    #[test]
    fn newcomers_need_an_address_to_join_at() {
        let with = |more: &[(&str, &str)]| of(&[&TORCHRUN[..], more].concat());
        let empty = with(&[("WEFTGRAD_JOIN_ADDRESS", "")]).unwrap();
        assert!(empty.join_address.is_none() && !empty.is_newcomer);
        for at in [&[][..], &[("WEFTGRAD_JOIN_ADDRESS", "")]] {
            let error = with(&[&[("WEFTGRAD_NEWCOMER", "1")], at].concat()).unwrap_err().to_string();
            assert!(error.contains("set WEFTGRAD_JOIN_ADDRESS"), "{error}");
        }
        let newcomer = with(&[("WEFTGRAD_NEWCOMER", "1"), ("WEFTGRAD_JOIN_ADDRESS", "node-1:29600")]).unwrap();
        assert!(newcomer.is_newcomer && newcomer.join_address.as_deref() == Some("node-1:29600"));
    }

    #[test]
    fn slurm_and_mpirun_give_host_and_job() {
        let (address, job, place_of) = place(&SLURM);
        assert!(address.starts_with("gpu03:") && job.as_deref() == Some("77.0"), "{address} {job:?}");
        assert_eq!(place_of, (5, 8));
        let other = [&[("SLURM_STEP_ID", "1")], &SLURM[..]].concat();
        assert_ne!(place(&other).0, address, "each step has a port");
        let alone = [&[("SLURM_STEP_NUM_NODES", "1")], &SLURM[..]].concat();
        assert!(place(&alone).0.starts_with("127.0.0.1:"));
        let (address, job, place_of) = place(&MPIRUN);
        assert!(address.starts_with("127.0.0.1:") && job.is_some() && place_of == (0, 2), "{address}");
        let many = [&[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")], &MPIRUN[..]].concat();
        assert!(of(&many).unwrap_err().to_string().contains("set MASTER_ADDR"));
        // Slurm may start torchrun.
        assert_eq!(place(&[&SLURM[..], &TORCHRUN].concat()).0, "node-1:29500");
        assert!(of(&[]).unwrap_err().to_string().contains("set RANK"));
    }

    #[test]
    fn launchers_tell_of_several_machines() {
        let spans = |name, value: &str| spans_hosts(&|of| (of == name).then(|| value.into()));
        for name in ["GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES"] {
            assert!(spans(name, "2") && !spans(name, "1") && !spans(name, "x"), "{name}");
        }
        assert!(!spans("WORLD_SIZE", "2"));
    }

    #[test]
    fn lists_of_hosts_have_a_first() {
        for (list, first) in [
            ("n1", Some("n1")),
            ("n1,n2", Some("n1")),
            ("n[1-3]", Some("n1")),
            ("rack[2,4]n[08-9]x,b", Some("rack2n08x")),
            ("b,rack[2,4]", Some("b")),
            ("", None),
            ("n[1", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
