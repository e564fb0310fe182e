"""System call numbers and the policy's three lists: allowed, allowed after a look at the arguments, and fatal.

Covers x86_64 and aarch64. A call in none of the lists fails with EPERM (or ENOSYS where the C library has a fallback).
"""

from __future__ import annotations

import platform


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


ALLOWED: frozenset[str] = words(
    """
    read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
    dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile sendto recvfrom sendmsg recvmsg shutdown
    getsockname getpeername getsockopt exit wait4 uname fsync fdatasync truncate
    ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink chmod fchmod
    umask gettimeofday getrlimit getrusage sysinfo times getuid getgid geteuid getegid getppid getpgrp
    setsid getgroups getresuid getresgid getpgid getsid capget rt_sigpending rt_sigtimedwait rt_sigqueueinfo
    rt_sigsuspend sigaltstack utime statfs fstatfs getpriority setpriority sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock arch_prctl setrlimit
    gettid readahead getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr time futex sched_setaffinity
    sched_getaffinity epoll_create getdents64 set_tid_address restart_syscall fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres clock_nanosleep
    exit_group epoll_wait epoll_ctl utimes waitid openat mkdirat futimesat newfstatat unlinkat renameat linkat
    symlinkat readlinkat fchmodat faccessat pselect6 ppoll set_robust_list get_robust_list splice tee utimensat
    epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime signalfd4 eventfd2
    epoll_create1 dup3 pipe2 preadv pwritev prlimit64 getcpu sched_getattr renameat2 getrandom membarrier mlock2
    copy_file_range preadv2 pwritev2 statx rseq close_range faccessat2 epoll_pwait2 futex_waitv sync_file_range
    get_mempolicy
    """
)
"""Calls an ordinary program needs and that reach nothing outside its own namespaces."""

GUARDED: frozenset[str] = words(
    """
    clone fork vfork execve execveat kill tkill tgkill socketpair prctl setpgid setsockopt fcntl
    """
)
"""Calls allowed for some arguments only, or only inside a PID namespace."""

FATAL: frozenset[str] = words(
    """
    ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd mount umount2 pivot_root chroot setns unshare
    open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr io_uring_setup io_uring_enter
    io_uring_register bpf perf_event_open userfaultfd add_key request_key keyctl init_module finit_module
    delete_module kexec_load kexec_file_load reboot swapon swapoff acct settimeofday clock_settime adjtimex
    clock_adjtime sethostname setdomainname iopl ioperm quotactl quotactl_fd syslog open_by_handle_at
    name_to_handle_at fanotify_init modify_ldt setuid setgid setreuid setregid setresuid setresgid setgroups
    setfsuid setfsgid capset
    """
)
"""Calls no honest program makes: the process dies and the outcome is killed_by_policy."""


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (pair.split(":") for pair in text.split())}


X86_64: dict[str, int] = _table(
    """
    access:21 acct:163 add_key:248 adjtimex:159 alarm:37 arch_prctl:158 bpf:321 brk:12 capget:125 capset:126
    chdir:80 chmod:90 chroot:161 clock_adjtime:305 clock_getres:229 clock_gettime:228 clock_nanosleep:230
    clock_settime:227 clone:56 clone3:435 close:3 close_range:436 copy_file_range:326 creat:85 delete_module:176
    dup:32 dup2:33 dup3:292 epoll_create:213 epoll_create1:291 epoll_ctl:233 epoll_pwait:281 epoll_pwait2:441
    epoll_wait:232 eventfd:284 eventfd2:290 execve:59 execveat:322 exit:60 exit_group:231 faccessat:269
    faccessat2:439 fadvise64:221 fallocate:285 fanotify_init:300 fchdir:81 fchmod:91 fchmodat:268 fcntl:72
    fdatasync:75 fgetxattr:193 finit_module:313 flistxattr:196 flock:73 fork:57 fsconfig:431 fsmount:432
    fsopen:430 fspick:433 fstat:5 fstatfs:138 fsync:74 ftruncate:77 futex:202 futex_waitv:449 futimesat:261
    get_mempolicy:239 get_robust_list:274 getcpu:309 getcwd:79 getdents:78 getdents64:217 getegid:108
    geteuid:107 getgid:104 getgroups:115 getitimer:36 getpeername:52 getpgid:121 getpgrp:111 getpid:39
    getppid:110 getpriority:140 getrandom:318 getresgid:120 getresuid:118 getrlimit:97 getrusage:98 getsid:124
    getsockname:51 getsockopt:55 gettid:186 gettimeofday:96 getuid:102 getxattr:191 init_module:175
    io_uring_enter:426 io_uring_register:427 io_uring_setup:425 ioctl:16 ioperm:173 iopl:172 kcmp:312
    kexec_file_load:320 kexec_load:246 keyctl:250 kill:62 landlock_add_rule:445 landlock_create_ruleset:444
    landlock_restrict_self:446 lgetxattr:192 link:86 linkat:265 listxattr:194 llistxattr:195 lseek:8 lstat:6
    madvise:28 membarrier:324 mincore:27 mkdir:83 mkdirat:258 mknod:133 mknodat:259 mlock:149 mlock2:325 mmap:9
    modify_ldt:154 mount:165 mount_setattr:442 move_mount:429 mprotect:10 mremap:25 msync:26 munlock:150
    munmap:11 name_to_handle_at:303 nanosleep:35 newfstatat:262 open:2 open_by_handle_at:304 open_tree:428
    openat:257 pause:34 perf_event_open:298 pidfd_getfd:438 pidfd_send_signal:424 pipe:22 pipe2:293
    pivot_root:155 poll:7 ppoll:271 prctl:157 pread64:17 preadv:295 preadv2:327 prlimit64:302
    process_vm_readv:310 process_vm_writev:311 pselect6:270 ptrace:101 pwrite64:18 pwritev:296 pwritev2:328
    quotactl:179 quotactl_fd:443 read:0 readahead:187 readlink:89 readlinkat:267 readv:19 reboot:169 recvfrom:45
    recvmsg:47 rename:82 renameat:264 renameat2:316 request_key:249 restart_syscall:219 rmdir:84 rseq:334
    rt_sigaction:13 rt_sigpending:127 rt_sigprocmask:14 rt_sigqueueinfo:129 rt_sigreturn:15 rt_sigsuspend:130
    rt_sigtimedwait:128 sched_get_priority_max:146 sched_get_priority_min:147 sched_getaffinity:204
    sched_getattr:315 sched_getparam:143 sched_getscheduler:145 sched_rr_get_interval:148 sched_setaffinity:203
    sched_yield:24 select:23 sendfile:40 sendmsg:46 sendto:44 set_robust_list:273 set_tid_address:218
    setdomainname:171 setfsgid:123 setfsuid:122 setgid:106 setgroups:116 sethostname:170 setitimer:38 setns:308
    setpgid:109 setpriority:141 setregid:114 setresgid:119 setresuid:117 setreuid:113 setrlimit:160 setsid:112
    setsockopt:54 settimeofday:164 setuid:105 shutdown:48 sigaltstack:131 signalfd:282 signalfd4:289
    socketpair:53 splice:275 stat:4 statfs:137 statx:332 swapoff:168 swapon:167 symlink:88 symlinkat:266
    sync_file_range:277 sysinfo:99 syslog:103 tee:276 tgkill:234 time:201 timer_create:222 timer_delete:226
    timer_getoverrun:225 timer_gettime:224 timer_settime:223 timerfd_create:283 timerfd_gettime:287
    timerfd_settime:286 times:100 tkill:200 truncate:76 umask:95 umount2:166 uname:63 unlink:87 unlinkat:263
    unshare:272 userfaultfd:323 utime:132 utimensat:280 utimes:235 vfork:58 wait4:61 waitid:247 write:1
    writev:20
    """
)

AARCH64: dict[str, int] = _table(
    """
    acct:89 add_key:217 adjtimex:171 bpf:280 brk:214 capget:90 capset:91 chdir:49 chroot:51 clock_adjtime:266
    clock_getres:114 clock_gettime:113 clock_nanosleep:115 clock_settime:112 clone:220 clone3:435 close:57
    close_range:436 copy_file_range:285 delete_module:106 dup:23 dup3:24 epoll_create1:20 epoll_ctl:21
    epoll_pwait:22 epoll_pwait2:441 eventfd2:19 execve:221 execveat:281 exit:93 exit_group:94 faccessat:48
    faccessat2:439 fadvise64:223 fallocate:47 fanotify_init:262 fchdir:50 fchmod:52 fchmodat:53 fcntl:25
    fdatasync:83 fgetxattr:10 finit_module:273 flistxattr:13 flock:32 fsconfig:431 fsmount:432 fsopen:430
    fspick:433 fstat:80 fstatfs:44 fsync:82 ftruncate:46 futex:98 futex_waitv:449 get_mempolicy:236
    get_robust_list:100 getcpu:168 getcwd:17 getdents64:61 getegid:177 geteuid:175 getgid:176 getgroups:158
    getitimer:102 getpeername:205 getpgid:155 getpid:172 getppid:173 getpriority:141 getrandom:278 getresgid:150
    getresuid:148 getrlimit:163 getrusage:165 getsid:156 getsockname:204 getsockopt:209 gettid:178
    gettimeofday:169 getuid:174 getxattr:8 init_module:105 io_uring_enter:426 io_uring_register:427
    io_uring_setup:425 ioctl:29 kcmp:272 kexec_file_load:294 kexec_load:104 keyctl:219 kill:129
    landlock_add_rule:445 landlock_create_ruleset:444 landlock_restrict_self:446 lgetxattr:9 linkat:37
    listxattr:11 llistxattr:12 lseek:62 madvise:233 membarrier:283 mincore:232 mkdirat:34 mknodat:33 mlock:228
    mlock2:284 mmap:222 mount:40 mount_setattr:442 move_mount:429 mprotect:226 mremap:216 msync:227 munlock:229
    munmap:215 nanosleep:101 newfstatat:79 open_tree:428 openat:56 perf_event_open:241 pidfd_getfd:438
    pidfd_send_signal:424 pipe2:59 pivot_root:41 ppoll:73 prctl:167 pread64:67 preadv:69 preadv2:286
    prlimit64:261 process_vm_readv:270 process_vm_writev:271 pselect6:72 ptrace:117 pwrite64:68 pwritev:70
    pwritev2:287 quotactl:60 quotactl_fd:443 read:63 readahead:213 readlinkat:78 readv:65 reboot:142
    recvfrom:207 recvmsg:212 renameat:38 renameat2:276 request_key:218 restart_syscall:128 rseq:293
    rt_sigaction:134 rt_sigpending:136 rt_sigprocmask:135 rt_sigqueueinfo:138 rt_sigreturn:139 rt_sigsuspend:133
    rt_sigtimedwait:137 sched_get_priority_max:125 sched_get_priority_min:126 sched_getaffinity:123
    sched_getattr:275 sched_getparam:121 sched_getscheduler:120 sched_rr_get_interval:127 sched_setaffinity:122
    sched_yield:124 sendfile:71 sendmsg:211 sendto:206 set_robust_list:99 set_tid_address:96 setdomainname:162
    setfsgid:152 setfsuid:151 setgid:144 setgroups:159 sethostname:161 setitimer:103 setns:268 setpgid:154
    setpriority:140 setregid:143 setresgid:149 setresuid:147 setreuid:145 setrlimit:164 setsid:157
    setsockopt:208 settimeofday:170 setuid:146 shutdown:210 sigaltstack:132 signalfd4:74 socketpair:199
    splice:76 statfs:43 statx:291 swapoff:225 swapon:224 symlinkat:36 sync_file_range:84 sysinfo:179 syslog:116
    tee:77 tgkill:131 timer_create:107 timer_delete:111 timer_getoverrun:109 timer_gettime:108 timer_settime:110
    timerfd_create:85 timerfd_gettime:87 timerfd_settime:86 times:153 tkill:130 truncate:45 umask:166 umount2:39
    uname:160 unlinkat:35 unshare:97 userfaultfd:282 utimensat:88 wait4:260 waitid:95 write:64 writev:66
    """
)

AUDIT_ARCH: dict[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's name of each architecture, as a seccomp filter sees it."""

MACHINE: str = platform.machine()
"""The architecture this process runs on."""


def numbers(machine: str = MACHINE) -> dict[str, int]:
    """The system call numbers of an architecture."""
    tables = {"x86_64": X86_64, "aarch64": AARCH64}
    if machine not in tables:
        raise RuntimeError(f"no system call table for {machine!r}: the sandbox runs on x86_64 and aarch64")
    return tables[machine]
