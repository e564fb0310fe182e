"""System calls: the policy's three lists (allowed, allowed after a look at the arguments, fatal) and their numbers.

Each call is written `name:x86_64:aarch64`, with a dash where an architecture lacks it. A call in none of the lists
fails with EPERM (or ENOSYS where the C library has a fallback).
"""

from __future__ import annotations

import platform


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


X86_64: dict[str, int] = {}
AARCH64: dict[str, int] = {}


def _list_calls(text: str) -> frozenset[str]:
    """The names of the calls in a text, whose numbers go to the two tables."""
    names = set()
    for call in text.split():
        name, *numbers = call.split(":")
        names.add(name)
        for table, number in zip((X86_64, AARCH64), numbers, strict=True):
            if number != "-":
                table[name] = int(number)
    return frozenset(names)


ALLOWED: frozenset[str] = _list_calls(
    """
    read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222
    mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
    ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:-
    sched_yield:24:124 mremap:25:216 msync:26:227 dup:32:23 dup2:33:- pause:34:-
    nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 sendto:44:206
    recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockname:51:204 getpeername:52:205
    getsockopt:55:209 exit:60:93 uname:63:160 fsync:74:82 fdatasync:75:83 truncate:76:45
    ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:-
    link:86:- unlink:87:- symlink:88:- readlink:89:- chmod:90:- fchmod:91:52 umask:95:166 gettimeofday:96:169
    getrlimit:97:163 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176 geteuid:107:175
    getegid:108:177 getppid:110:173 getpgrp:111:- setsid:112:157 getgroups:115:158 getresuid:118:148
    getresgid:120:150 getpgid:121:155 getsid:124:156 capget:125:90 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigqueueinfo:129:138 rt_sigsuspend:130:133 sigaltstack:131:132 utime:132:- statfs:137:43 fstatfs:138:44
    getpriority:140:141 setpriority:141:140 sched_getparam:143:121 sched_getscheduler:145:120
    sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 mlock:149:228
    munlock:150:229 arch_prctl:158:- gettid:186:178 getxattr:191:8
    lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 time:201:- futex:202:98
    sched_setaffinity:203:122 sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61 set_tid_address:218:96
    restart_syscall:219:128 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
    timer_getoverrun:225:109 timer_delete:226:111 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
    exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 utimes:235:- openat:257:56 mkdirat:258:34
    futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36
    readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
    get_robust_list:274:100 tee:276:77 utimensat:280:88 epoll_pwait:281:22 signalfd:282:-
    timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86 timerfd_gettime:287:87
    signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 preadv:295:69 pwritev:296:70
    getcpu:309:168 sched_getattr:315:275 renameat2:316:276 getrandom:318:278 membarrier:324:283
    mlock2:325:284 copy_file_range:326:285 statx:332:291 rseq:334:293
    close_range:436:436 faccessat2:439:439 epoll_pwait2:441:441 futex_waitv:449:449 sync_file_range:277:84
    """
)
"""Calls an ordinary program needs and that reach nothing outside its own namespaces."""

GUARDED: frozenset[str] = _list_calls(
    """
    clone:56:220 fork:57:- vfork:58:- execve:59:221 execveat:322:281 kill:62:129 tkill:200:130 tgkill:234:131
    socketpair:53:199 prctl:157:167 setpgid:109:154 setsockopt:54:208 fcntl:72:25 madvise:28:233 splice:275:76
    preadv2:327:286 pwritev2:328:287 wait4:61:260 waitid:247:95 get_mempolicy:239:236 setrlimit:160:164
    prlimit64:302:261
    """
)
"""Calls allowed for some arguments only, or only inside a PID namespace."""

FATAL: frozenset[str] = _list_calls(
    """
    ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272 pidfd_getfd:438:438 mount:165:40
    umount2:166:39 pivot_root:155:41 chroot:161:51 setns:308:268 unshare:272:97 open_tree:428:428 move_mount:429:429
    fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 io_uring_setup:425:425
    io_uring_enter:426:426 io_uring_register:427:427 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282
    add_key:248:217 request_key:249:218 keyctl:250:219 init_module:175:105 finit_module:313:273
    delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225
    acct:163:89 settimeofday:164:170 clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266
    sethostname:170:161 setdomainname:171:162 iopl:172:- ioperm:173:- quotactl:179:60 quotactl_fd:443:443
    syslog:103:116 open_by_handle_at:304:265 name_to_handle_at:303:264 fanotify_init:300:262 modify_ldt:154:-
    setuid:105:146 setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149
    setgroups:116:159 setfsuid:122:151 setfsgid:123:152 capset:126:91
    """
)
"""Calls no honest program makes: the process dies and the outcome is killed_by_policy."""

# In none of the lists: calls that we make ourselves, and those that the filter answers in a way of its own.
_list_calls(
    """
    landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446 clone3:435:435 flock:73:32
    readahead:187:213 fadvise64:221:223 mincore:27:232 getrusage:98:165 cachestat:451:451
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
