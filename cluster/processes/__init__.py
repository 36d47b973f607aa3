"""All processes of Tidemill, by what starts them. Only the files of this folder import Ray.

    tidemill serve              server.py            serves clients itself, if --frontends is 1
    ├── tidemill edge           frontends.py         one for each of --frontends N, otherwise
    ├── reaper                  system/reaper.py     removes what a killed server leaves
    └── Ray                     launch.py            its own, or joined by --ray-address
        └── Supervisor          supervisor.py        starts, scales and stops by scaling/journal.py
            ├── RouterActor     router_actor.py      one or more for each model
            ├── StoreActor      mooncake_service.py  the processes of Mooncake, if the server has them
            └── WorkerActor     worker_actor.py      one for each worker: a rank, or the leader of several
                └── RankActor   worker_actor.py      one for each other rank
    tidemill serve --detach     detached.py          Ray and the same; the supervisor keeps the endpoint
    tidemill edge --join        joined_edge.py       started by operators; certificates come by joining/

Ray starts an actor again when its process ends.
"""
